"""Decides how many replicas blocks have: hot blocks gain replicas and lose them when they cool down; callers can set a
number. Decisions (`heat`, `planner`) are pure; `shell` has the nodes carry them out."""
