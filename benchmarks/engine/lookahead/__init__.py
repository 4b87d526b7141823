"""Compares the policies that share a pool of blocks (`engine.lookahead`) on the same requests."""
