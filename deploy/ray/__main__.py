"""`python -m deploy.ray CLUSTER.yaml`: `moonserve deploy ray`, as the entry point of `ray job submit`."""

from __future__ import annotations

import sys

from deploy.ray.command import main

if __name__ == "__main__":
    sys.exit(main(["ray", *sys.argv[1:]]))
