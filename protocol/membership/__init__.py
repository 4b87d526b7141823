"""Membership of the cluster: with the conductor (heartbeats.py, conductor_client.py), and in a registry (Redis or
embedded)."""
