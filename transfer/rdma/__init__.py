"""The rdma transport: an RDMA device moves the bytes, and a TCP connection next to it carries the agreements."""
