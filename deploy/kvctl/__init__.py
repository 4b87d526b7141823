"""`moonserve kvctl`: inspects and operates a running KV store.

Each module has the arguments (`add_…`) and the body (`run…`) of its verbs; `cluster` makes the calls.
"""
