"""When a worker should change between prefill and decode, and how it is told (docs/role-switching.md)."""
