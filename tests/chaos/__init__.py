"""Chaos: a real cluster under a replayed trace, whose processes, connections and disk are attacked at random."""
