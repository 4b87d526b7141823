"""Models of a cluster's machines, pool and network in virtual time, and what is simulated (spec.py) and measured
(results.py)."""
