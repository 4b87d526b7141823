"""Metadata of millions of blocks in compact memory: Python owns the memory, C works on it."""
