"""`python -m traces.reproduction`: as `moonserve reproduce`."""

import sys

from traces.reproduction.command import main

if __name__ == "__main__":
    sys.exit(main())
