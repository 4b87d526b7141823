"""Which tenant's turn it is, and what that does to the queues (docs/fairness.md). Pure."""
