"""Whoever asks for Triton where it cannot run is told what to do."""

from __future__ import annotations

import pytest
import torch

from engine.cuda import requirements
from protocol.errors import ConfigError

CPU = torch.device("cpu")


def test_without_triton_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moonserve\[gpu\]'"):
        requirements.require_triton(CPU)


def test_a_cpu_is_refused_where_nothing_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _name: object())
    monkeypatch.setattr(requirements, "is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="CUDA"):
        requirements.require_triton(CPU)
    requirements.require_triton(torch.device("cuda"))


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="abacus"):
        requirements.find_device("abacus")
