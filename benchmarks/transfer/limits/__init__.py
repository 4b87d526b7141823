"""Limits of the machine: memory copies, reads across processes, raw sockets and iperf3."""
