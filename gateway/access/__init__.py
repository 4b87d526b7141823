"""Who may ask, and for how much: API keys and their limits."""
