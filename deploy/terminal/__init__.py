"""Code shared by commands about a running cluster: requests to its gateway, calls to workers, output, exit codes."""
