"""One distributed KV store: nodes that own their memory, the index over them, and the client that moves bytes.

Owns which objects exist where, and for how long. Imports `protocol` and `transfer` only; knows nothing about tensors,
models or placement.
"""
