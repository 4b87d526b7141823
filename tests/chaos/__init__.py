"""Chaos test: a real cluster serves a replayed trace while faults hit its processes, connections and disk at random."""
