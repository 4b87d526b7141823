"""Peers under one kernel: memory mapped, copied once."""
