"""Fixtures that run pools of three real store nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.client.pools import DRAM
from tests.kvstore.faults.pool import Pool, running_pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with running_pool(tmp_path, 3, "--dram", str(DRAM)) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool shared by a module's tests, which leave nothing but their own objects behind."""
    with running_pool(tmp_path_factory.mktemp("pool"), 3, "--dram", str(DRAM)) as pool:
        yield pool
