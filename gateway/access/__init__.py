"""Access control: API keys (api_key.py, key_table.py), rate limits (decisions: rate_limit_state.py; I/O:
rate_limit_service.py), tenants."""
