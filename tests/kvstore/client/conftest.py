"""Pools of three real nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kvstore.client.pools import Pool, running_pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    with running_pool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    """For tests that leave no trace but objects of their own."""
    with running_pool(3) as pool:
        yield pool
