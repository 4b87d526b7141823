"""Where the model that an operator names is on this machine."""

from __future__ import annotations

from pathlib import Path

from engine.config import load_model_config
from engine.hub import resolve_model
from models import demo_model_path


def model_folder(name: str | None) -> Path:
    """`name`: a local Hugging Face folder or hub name; None = the demo model. Downloads what is missing, and checks
    what can be checked without weights. Raises ConfigError."""
    path = demo_model_path() if name is None else resolve_model(name)
    load_model_config(path)
    return path
