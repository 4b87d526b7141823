"""Traces as workloads: `moonserve traces fetch | analyze | synthesize`, and prompts. I/O: fetch.py, analyze.py,
synthesize.py."""
