"""Device of the Triton tests: a GPU if there is one, otherwise the CPU with Triton's interpreter.

Each module that needs Triton skips itself if it is not installed: a conftest that skipped would end the run.
"""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE
