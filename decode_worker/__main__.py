"""Command-line entry of a decode worker: `python -m decode_worker`."""

import sys
from functools import partial

from decode_worker.config import DecodeConfig
from decode_worker.worker import serve
from protocol import process

main = partial(process.main, DecodeConfig, serve, prog="moonserve worker --role decode")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
