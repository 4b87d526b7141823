"""A decode worker that also prefills prompts that were placed there whole (docs/conditional-disaggregation.md)."""
