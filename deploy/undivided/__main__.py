"""`python -m deploy.undivided`."""

from __future__ import annotations

import sys

from deploy.undivided.config import UndividedConfig
from deploy.undivided.worker import serve
from protocol import process

_PROG = "moonserve worker --role decode --conditional-disaggregation on"


def main(argv: list[str] | None = None) -> int:
    """Runs a decode worker that also prefills until it is told to stop."""
    return process.main(UndividedConfig, serve, argv, prog=_PROG)


if __name__ == "__main__":
    sys.exit(main())
