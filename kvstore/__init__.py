"""Distributed KV store: nodes that own memory, a directory of their objects, and a client that moves the bytes.

Owns which objects exist where, and for how long. Imports `protocol` and `transfer` only; knows nothing about tensors,
models or placement.
"""
