"""One request from its acceptance to its last token: decisions in state.py, I/O in attempts.py and service.py."""
