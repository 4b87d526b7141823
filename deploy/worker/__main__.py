"""Entry point of `python -m deploy.worker`."""

import sys
from functools import partial

from deploy.worker.config import WorkerConfig
from deploy.worker.worker import serve
from protocol import process

main = partial(process.main, WorkerConfig, serve, prog="moonserve worker --role-switching on")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
