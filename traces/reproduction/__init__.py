"""Reproduction of published figures: simulations, rows next to the published values, and reasons for differences."""
