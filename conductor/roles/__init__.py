"""Decides when a worker changes between prefill and decode (docs/role-switching.md)."""
