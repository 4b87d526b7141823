"""Loops of a placement in C that would take too many numpy calls."""
