"""Measures the gateway's cost: `python -m benchmarks.gateway` (docs/gateway-performance.md)."""

import os

# uvloop forks while gRPC has threads. With gRPC's fork handlers, one client process in thirty never reported back.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
