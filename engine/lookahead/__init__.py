"""Admission and preemption policies of decode workers, by predicted need: `OnDemand` (base.py) and `Lookahead`. Pure;
imports neither torch nor a worker."""
