"""Entry point of `python -m deploy.ray CLUSTER.yaml`, for `ray job submit`. Same as `moonserve deploy ray`."""

from __future__ import annotations

import sys

from deploy.ray.command import main

if __name__ == "__main__":
    sys.exit(main(["ray", *sys.argv[1:]]))
