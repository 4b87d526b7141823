"""What the machine can do: memory copies, reads across processes, raw sockets."""
