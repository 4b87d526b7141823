"""Commands on a running cluster: keys, explain, top, drain, role, and kvctl (kvctl.py selects the verb;
kvctl_cluster.py makes the calls)."""
