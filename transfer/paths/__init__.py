"""From a batch's slices to a session. Decisions: path_selection.py, rail_health.py, topology.py, failover.py; I/O:
lane.py, hardware_discovery.py."""
