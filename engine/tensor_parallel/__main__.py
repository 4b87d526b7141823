"""`python -m engine.tensor_parallel`: a rank, started by rank 0."""

from __future__ import annotations

import sys

from engine.tensor_parallel.config import RankConfig
from engine.tensor_parallel.rank import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    """Computes its share of a worker's steps until rank 0 ends."""
    return process.main(RankConfig, serve, argv, prog="python -m engine.tensor_parallel")


if __name__ == "__main__":
    sys.exit(main())
