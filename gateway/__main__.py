"""Runs the OpenAI-compatible HTTP server of a cluster: `python -m gateway`."""

import sys
from functools import partial

from gateway.config import GatewayConfig
from gateway.server import serve
from protocol import process

main = partial(process.main, GatewayConfig, serve, prog="moonserve gateway")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
