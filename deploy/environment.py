"""Settings that a launcher derives from its machine: the environment of its processes, log folder and model folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.config import load_model_config, resolve_model
from models import demo_model_path
from protocol.config import ENV_PREFIX


def child_environment(inherited: Mapping[str, str], cluster_token: str, num_threads: int) -> dict[str, str]:
    """Returns the launcher's environment for its processes. moonserve's own variables are removed: they configure the
    launcher, which passes them on as flags. `num_threads`: compute threads of a worker."""
    foreign = {k: v for k, v in inherited.items() if not k.startswith(ENV_PREFIX)}
    return {
        **foreign,
        f"{ENV_PREFIX}CLUSTER_TOKEN": cluster_token,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        # The packages may be in the current folder instead of site-packages.
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def model_folder(name: str | None) -> Path:
    """Returns the model's folder. `name`: local Hugging Face folder or hub name; None = the demo model. Downloads
    missing files and checks the model's configuration, which needs no weights. Raises ConfigError."""
    path = demo_model_path() if name is None else resolve_model(name)
    load_model_config(path)
    return path


def log_folder(named: str | None, own: str) -> Path:
    """Returns the folder for logs, which need not exist: `named`, or else `own` in moonserve's state folder."""
    if named is not None:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "moonserve" / own
