"""What a launcher knows of its machine: the environment of its processes, the folder of logs, that of the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.config import load_model_config, resolve_model
from models import demo_model_path
from protocol.config import ENV_PREFIX


def child_environment(inherited: Mapping[str, str], cluster_token: str, num_threads: int) -> dict[str, str]:
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


def model_folder(name: str | None) -> Path:
    """`name`: a local Hugging Face folder or hub name; None = the demo model. Downloads what is missing, and checks
    what can be checked without weights. Raises ConfigError."""
    path = demo_model_path() if name is None else resolve_model(name)
    load_model_config(path)
    return path


def log_folder(named: str | None, own: str) -> Path:
    """`named`: as the operator says; else `own` among moonserve's state. It need not exist."""
    if named is not None:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "moonserve" / own
