"""Membership: one contract for all registries, seats, identities, and what a lost Redis does."""
