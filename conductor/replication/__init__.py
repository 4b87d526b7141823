"""Which prefixes store nodes copy from each other, and how they are told (docs/replication.md)."""
