"""The demo model that the repository ships, and the code that trains it.

Importing this package loads nothing heavy; torch and transformers are needed only to retrain.
"""

from pathlib import Path


def demo_model_path() -> Path:
    """Returns the directory of the shipped model: configuration, tokenizer and weights."""
    return Path(__file__).resolve().parent / "demo"
