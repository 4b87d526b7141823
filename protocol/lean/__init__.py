"""Calls where microseconds count: the generated messages and servicers of gRPC over a connection of our own.

Rare calls stay with gRPC (`protocol.rpc`), which costs several times as much per call.
"""
