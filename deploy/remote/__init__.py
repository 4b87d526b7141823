"""Commands that ask a running cluster, or tell it something: top, explain, drain, role.

Each owns its arguments and what it prints; `kvctl` is for the KV store alone.
"""
