"""Skips the tests of this folder where network namespaces cannot be created."""

import pytest

from benchmarks.networks.hosts import missing_requirement


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    if (reason := missing_requirement()) is not None:
        pytest.skip(reason)
