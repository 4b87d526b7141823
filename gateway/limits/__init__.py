"""Limits per key: requests and tokens per minute, requests under way.

`bucket` is one token bucket, `state` all of a gateway's (both pure), `shared` those of several gateways in Redis,
`limiter` asks both, `visit` is one request's way through them, `headers` what its client is told.
"""
