"""From what the operator typed to a local model folder. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from protocol.errors import ConfigError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]


def resolve_model(name_or_path: str) -> Path:
    """A local folder as it is; otherwise `organisation/name`, downloaded from the hub (or found in its cache).
    Raises ConfigError."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model {name_or_path} is a file; give the folder that holds config.json")
    if not _REPOSITORY.fullmatch(name_or_path):
        raise ConfigError(
            f"model {name_or_path} is neither a folder nor a hub name like organisation/name"
        )
    return _download(name_or_path)


def _download(name: str) -> Path:
    # Imported here: it is slow, and a local folder needs none of it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # of three trees:
        # The hub's client raises its own tree, its HTTP library's and OSError: one and the same to the operator.
        raise ConfigError(
            f"model {name} is no local folder and cannot be downloaded from the hub: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
