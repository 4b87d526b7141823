"""A cluster on Ray: actors on many machines supervise the same processes that `moonserve serve` starts.

Ray places, watches and restarts. Tokens and KV use the project's own channels. Nothing here imports ray before it is
needed, because it is an extra.
"""
