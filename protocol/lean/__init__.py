"""Unary calls where microseconds count: the generated messages and servicers of gRPC over a connection of our own.

Streams and rare calls stay with gRPC (`protocol.rpc`), which costs several times as much per call.
"""
