"""What the gateway costs: `python -m benchmarks.gateway` (docs/gateway-performance.md)."""

import os

# uvloop forks where gRPC has threads: with gRPC's handlers for forks one client in thirty was never heard of.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
