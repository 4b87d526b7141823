"""`python -m prefill_worker`."""

from __future__ import annotations

import sys

from prefill_worker.config import PrefillConfig
from prefill_worker.worker import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    """Runs a prefill worker until it is told to stop."""
    return process.main(PrefillConfig, serve, argv, prog="moonserve worker --role prefill")


if __name__ == "__main__":
    sys.exit(main())
