"""`python -m prefill_worker.pipeline`: a follower, started by its leader."""

from __future__ import annotations

import sys

from prefill_worker.pipeline.follower import FollowerConfig, serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    """Runs one stage until it is told to stop."""
    return process.main(FollowerConfig, serve, argv, prog="python -m prefill_worker.pipeline")


if __name__ == "__main__":
    sys.exit(main())
