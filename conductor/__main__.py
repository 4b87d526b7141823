"""`python -m conductor`: the cluster's global scheduler."""

import sys
from functools import partial

from conductor.config import ConductorConfig
from conductor.service import serve
from protocol import process

main = partial(process.main, ConductorConfig, serve, prog="moonserve conductor")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
