"""Triton kernels, compiled where there is a GPU, else in Triton's interpreter on tensors of the CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE
