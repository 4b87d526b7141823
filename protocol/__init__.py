"""Types, wire formats and process plumbing that every process of the cluster shares.

This package owns ids, block keys, the KV layout, requests, errors, configuration, metrics and RPC. It does not know
tensors, HTTP or scheduling. Every other package may import it; it imports none of them.
"""
