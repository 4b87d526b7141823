"""Runs the directory: `python -m kvstore.directory`. It indexes all store nodes and replicates hot blocks."""

from __future__ import annotations

import sys

from kvstore.directory.config import DirectoryConfig
from kvstore.directory.serve import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    return process.main(DirectoryConfig, serve, argv, prog="moonserve directory")


if __name__ == "__main__":
    sys.exit(main())
