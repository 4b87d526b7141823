"""API keys: whose a request is.

`record` is one key as it is stored, `keyring` finds the one that was presented, `file` and `redis_keys` keep them,
`holder` has those that count now.
"""
