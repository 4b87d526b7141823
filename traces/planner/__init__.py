"""Which cluster a trace needs: division, policy, cache and size, searched for with the simulator."""
