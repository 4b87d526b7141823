"""Entry point of `python -m deploy.undivided`."""

import sys
from functools import partial

from deploy.undivided.config import UndividedConfig
from deploy.undivided.worker import serve
from protocol import process

main = partial(
    process.main,
    UndividedConfig,
    serve,
    prog="moonserve worker --role decode --conditional-disaggregation on",
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
