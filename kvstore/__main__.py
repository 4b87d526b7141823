"""Runs one node of the KV store: `python -m kvstore`."""

import sys
from functools import partial

from kvstore.config import StoreConfig
from kvstore.node import serve
from protocol import process

main = partial(process.main, StoreConfig, serve, prog="moonserve store")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
