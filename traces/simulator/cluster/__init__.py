"""A whole cluster in virtual time around the conductor's own state machine: run.py runs a disaggregated or a coupled
one."""
