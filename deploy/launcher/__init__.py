"""`moonserve serve`: a cluster on one machine. Decisions: process_specs.py; I/O: serve.py, supervisor.py,
rolling_restart.py."""
