"""Disaggregated prefill/decode serving of large language models. `python -m moonserve` is the command."""
