"""Commands that query or change a running cluster: top, explain, drain, role.

Each owns its arguments and its output. `kvctl` is for the KV store.
"""
