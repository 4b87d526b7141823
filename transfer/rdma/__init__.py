"""The rdma transport: an RDMA device moves the bytes, and a TCP connection beside it carries the agreements. Initiator:
session.py; target: target.py."""
