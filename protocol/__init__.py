"""The language that every process of the cluster shares.

Owns ids, block keys, the KV layout, requests, errors, configuration, metrics and RPC plumbing. Knows nothing about
tensors, HTTP or scheduling; every other package may import it and it imports none of them.
"""
