"""Tests with a real vLLM, in its own environment (`make test-vllm`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder `vllm`, and skips them where vLLM is not installed."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))
