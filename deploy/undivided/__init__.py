"""A decode worker that also prefills prompts that are placed on it undivided (docs/conditional-disaggregation.md)."""
