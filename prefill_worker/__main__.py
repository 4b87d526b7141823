"""Command-line entry of a prefill worker: `python -m prefill_worker`."""

import sys
from functools import partial

from prefill_worker.config import PrefillConfig
from prefill_worker.worker import serve
from protocol import process

main = partial(process.main, PrefillConfig, serve, prog="moonserve worker --role prefill")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
