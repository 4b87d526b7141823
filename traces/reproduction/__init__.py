"""The published figures again: each one's simulations, its rows beside what was published, and why they differ."""
