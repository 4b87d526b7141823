"""`python -m kvstore.directory`: the index over all store nodes, and the replication of what is hot."""

from __future__ import annotations

import sys

from kvstore.directory.config import DirectoryConfig
from kvstore.directory.serve import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    return process.main(DirectoryConfig, serve, argv, prog="moonserve directory")


if __name__ == "__main__":
    sys.exit(main())
