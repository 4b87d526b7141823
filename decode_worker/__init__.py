"""The decode phase: receives prompts' KV, runs continuous batching, streams tokens. Decisions: state.py over
decisions/; I/O: service.py."""
