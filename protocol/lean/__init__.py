"""Low-latency RPC: the messages and servicers that gRPC generates, over a simpler connection.

Rare calls stay with gRPC (`protocol.rpc`), which costs several times as much per call.
"""
