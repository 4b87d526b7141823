"""Paths between two engines: discovery, choice, health and connection limits. Pure except for `discovery`."""
