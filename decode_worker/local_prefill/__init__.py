"""A decode worker that also computes short prompts (`--conditional-disaggregation on`). Decisions: state.py,
publishing.py; I/O: worker.py."""
