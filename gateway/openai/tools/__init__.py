"""Tool calls: what clients offer, what a grammar enforces, and what a model's text says of calls, as it comes."""
