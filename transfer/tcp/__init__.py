"""The tcp transport, and the stream connection that shm and rdma use next to their own data paths."""
