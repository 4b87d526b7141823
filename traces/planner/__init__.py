"""Finds the cluster that a trace needs: division into roles, policy, cache and size. Searches with the simulator."""
