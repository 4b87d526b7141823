"""Fairness between tenants, and its effect on the order of prefill queues (docs/fairness.md). Pure."""
