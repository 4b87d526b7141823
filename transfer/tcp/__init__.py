"""The tcp transport, and the stream connection that shm and rdma use beside their own ways."""
