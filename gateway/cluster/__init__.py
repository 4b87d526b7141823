"""One gateway's view of the cluster: live instances, instances to avoid, and figures of the last minute."""
