"""Looks for cyclic garbage are few, and garbage is bounded all the same."""

from __future__ import annotations

import gc
import weakref

import pytest

from protocol import garbage
from protocol.garbage import seldom_collected


@pytest.fixture(autouse=True)
def _really(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' services leave the heap alone (tests/conftest.py)."""
    monkeypatch.setattr(garbage, "gc", gc)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_do_not_pile_up() -> None:
    """As gRPC's server leaves them behind its calls."""
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    most = 0
    with seldom_collected():
        for _ in range(40_000):
            alive.add(Cycle())
            most = max(most, len(alive))
    assert 1_000 < most < 20_000, "neither a look for each of them nor one for all"


def test_what_is_there_is_never_looked_at() -> None:
    kept = [Cycle()]
    before = gc.get_threshold()
    with seldom_collected():
        assert gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
