"""`python -m gateway`: the OpenAI-compatible front of a cluster."""

from __future__ import annotations

import sys

import uvloop

from gateway.config import GatewayConfig
from gateway.server import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    """Runs the gateway until it is told to stop; the exit code."""
    return process.main(GatewayConfig, serve, argv, prog="moonserve gateway", loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
