"""Registry of a cluster's members, kept in Redis or in one of the cluster's own processes, behind one interface."""
