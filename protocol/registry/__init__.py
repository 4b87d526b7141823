"""Membership of a cluster: one interface, kept in Redis or in one of the cluster's own processes."""
