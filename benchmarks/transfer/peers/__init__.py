"""Other transfer engines as contestants, used from Python according to their documentation."""
