"""One request, from placement to its last token, across losses. Decisions: request_state.py over ordered_tokens.py;
I/O: request_runner.py, service.py."""
