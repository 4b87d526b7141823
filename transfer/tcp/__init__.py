"""The tcp transport, and the stream connection that shm and rdma use beside their own data paths. Initiator:
session.py; target: target.py."""
