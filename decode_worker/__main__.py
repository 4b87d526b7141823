"""`python -m decode_worker`."""

from __future__ import annotations

import sys

from decode_worker.config import DecodeConfig
from decode_worker.worker import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    """Runs a decode worker until it is told to stop."""
    return process.main(DecodeConfig, serve, argv, prog="moonserve worker --role decode")


if __name__ == "__main__":
    sys.exit(main())
