"""`python -m conductor`: the cluster's global scheduler."""

from __future__ import annotations

import sys

from conductor.config import ConductorConfig
from conductor.service import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    return process.main(ConductorConfig, serve, argv, prog="moonserve conductor")


if __name__ == "__main__":
    sys.exit(main())
