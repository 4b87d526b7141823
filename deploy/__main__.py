"""Entry point of `python -m deploy VERB …`, which is the same as `moonserve VERB …`."""

import sys

from deploy.cli import main

if __name__ == "__main__":
    sys.exit(main())
