"""A worker that can change between prefill and decode while it runs (docs/role-switching.md)."""
