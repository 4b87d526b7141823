"""One cluster of two nodes for the tests that break nothing; each stores objects of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.kvctl.stage import Kvctl, Stage, stage


@pytest.fixture(scope="package")
def pair() -> Iterator[Stage]:
    with stage(["store-0", "store-1"]) as made:
        yield made


@pytest.fixture
def kvctl(pair: Stage, capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """On `pair`."""
    return Kvctl(capsys, pair.registry)
