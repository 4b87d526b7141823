"""RPC between processes: gRPC (grpc_transport.py), and the same calls faster over plain sockets (socket_*.py, addresses
`lean://…`)."""
