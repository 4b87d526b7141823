"""What travels on a connection, and both ends of one."""
