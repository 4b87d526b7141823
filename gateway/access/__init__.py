"""Access control: API keys and their limits."""
