"""Triton kernels, compiled where there is a GPU, else in Triton's interpreter on tensors of the CPU.

Each module that needs Triton skips itself where it is not installed: a conftest that did would end the run.
"""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE
