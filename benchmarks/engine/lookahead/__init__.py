"""Ways to share a pool of blocks, beside each other on the same requests (engine.lookahead)."""
