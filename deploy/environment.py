"""The environment of the processes that a launcher starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from protocol.config import ENV_PREFIX


def child_environment(
    inherited: Mapping[str, str], cluster_token: str, num_threads: int
) -> dict[str, str]:
    """What a launcher was given itself, without moonserve's own variables, which are for the launcher and reach the
    others as flags. `num_threads`: of a worker."""
    foreign = {k: v for k, v in inherited.items() if not k.startswith(ENV_PREFIX)}
    return {
        **foreign,
        f"{ENV_PREFIX}CLUSTER_TOKEN": cluster_token,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        # The packages may stand in the current folder rather than in site-packages.
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
