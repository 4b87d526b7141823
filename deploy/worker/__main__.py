"""`python -m deploy.worker`."""

from __future__ import annotations

import sys

from deploy.worker.config import WorkerConfig
from deploy.worker.worker import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    """Runs a worker of changing roles until it is told to stop."""
    return process.main(WorkerConfig, serve, argv, prog="moonserve worker --role-switching on")


if __name__ == "__main__":
    sys.exit(main())
