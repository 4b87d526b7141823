"""A cluster on Ray: actors that supervise the processes which `moonserve serve` would start, on many machines.

Ray places, watches and restarts; tokens and KV go over the project's own channels. Nothing here imports ray before it
is needed: it is an extra.
"""
