"""Remote direct memory access: an RDMA device moves the bytes, a TCP connection beside it agrees on them."""
