"""The demo model that the repository ships, in the folder that `demo_model_path` names. docs/demo_model trains it."""

from pathlib import Path


def demo_model_path() -> Path:
    """Returns the directory of the shipped model: configuration, tokenizer and weights."""
    return Path(__file__).resolve().parent / "demo"
