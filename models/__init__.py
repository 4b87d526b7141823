"""The demo model that the repository ships, and the code that trains it. Its folder: `demo_model_path`."""

from pathlib import Path


def demo_model_path() -> Path:
    """Returns the directory of the shipped model: configuration, tokenizer and weights."""
    return Path(__file__).resolve().parent / "demo"
