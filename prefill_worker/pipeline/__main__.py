"""Command-line entry of a follower stage, started by its leader: `python -m prefill_worker.pipeline`."""

import sys
from functools import partial

from prefill_worker.pipeline.follower import FollowerConfig, serve
from protocol import process

main = partial(process.main, FollowerConfig, serve, prog="python -m prefill_worker.pipeline")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
