"""Life of one request from acceptance to last token: decisions in `state`, I/O in `attempts` and `service`."""
