"""The prefill phase: computes prompts and sends their KV to decode workers, layer by layer. Decisions: state.py over
decisions/; I/O: service.py."""
