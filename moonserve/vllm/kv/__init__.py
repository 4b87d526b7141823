"""The connector without vLLM's classes: what its halves in the scheduler and in the workers decide and move."""
