"""Entry point of a rank process, `python -m engine.tensor_parallel`. Started by rank 0."""

import sys
from functools import partial

from engine.tensor_parallel.rank import RankConfig, serve
from protocol import process

main = partial(process.main, RankConfig, serve, prog="python -m engine.tensor_parallel")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
