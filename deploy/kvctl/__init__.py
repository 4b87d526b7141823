"""`moonserve kvctl`: what an operator sees of a running KV store, and does to it.

Each verb is one module with `add_to` (its arguments) and `run`; `cluster` makes the calls.
"""
