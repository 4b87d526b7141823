"""What the gateway costs: `python -m benchmarks.gateway` (docs/gateway-performance.md)."""
