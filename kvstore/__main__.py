"""`python -m kvstore`: one node of the KV store."""

from __future__ import annotations

import sys

import uvloop

from kvstore.config import StoreConfig
from kvstore.node import serve
from protocol import process


def main(argv: list[str] | None = None) -> int:
    return process.main(StoreConfig, serve, argv, prog="moonserve store", loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    sys.exit(main())
