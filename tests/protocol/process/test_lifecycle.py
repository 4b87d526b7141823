"""Tests of the life cycle of a process: stop requests, waiting until it is idle, and infrequent garbage collection."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from moonserve.protocol.errors import StaleLease
from moonserve.protocol.process import lifecycle
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle, infrequent_gc
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _really(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the real `gc`. For other tests, tests/conftest.py replaces it so that services leave the heap alone."""
    monkeypatch.setattr(lifecycle, "gc", gc)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_wait_for_stop_ends_by_stop_or_cancellation(is_cancelled: bool) -> None:
    """A stop or a cancellation ends the wait. The watched task goes on."""
    lifecycle = Lifecycle(None)
    async with background_task(asyncio.Event().wait()) as other:
        waiting = asyncio.create_task(lifecycle.wait_for_stop(other))
        await asyncio.sleep(0)
        assert not waiting.done()
        if is_cancelled:
            waiting.cancel()
        else:
            lifecycle.stopping.set()
        with pytest.raises(asyncio.CancelledError) if is_cancelled else contextlib.nullcontext():
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert not other.done()
    assert other.cancelled()


async def test_error_of_watched_task_ends_the_wait() -> None:
    async def refused() -> None:
        raise StaleLease("a newer incarnation is registered")

    async with background_task(refused()) as task:
        with pytest.raises(StaleLease):
            await asyncio.wait_for(Lifecycle(None).wait_for_stop(task), PATIENCE_S)


@pytest.mark.parametrize(("times", "hurries"), [(1, False), (2, False), (1, True)])
async def test_stop_when_idle_waits_for_requests_until_stop(times: int, hurries: bool) -> None:
    """Work in flight gets all its time however often `stop_when_idle` was called. Only `stop` ends the wait early."""
    lifecycle, idle = Lifecycle(None), asyncio.Event()
    for _ in range(times):
        lifecycle.stop_when_idle()
    assert lifecycle.stopping.is_set()
    waiting = asyncio.create_task(lifecycle.wait_until_drained(idle.wait(), timeout_s=0.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    if hurries:
        lifecycle.stop()
    else:
        idle.set()
    assert await asyncio.wait_for(waiting, PATIENCE_S) is not hurries


async def test_stop_when_idle_after_stop_keeps_the_time_limit() -> None:
    lifecycle = Lifecycle(None)
    lifecycle.stop()
    lifecycle.stop_when_idle()
    never = asyncio.Event()
    assert not await asyncio.wait_for(lifecycle.wait_until_drained(never.wait(), 0.0), PATIENCE_S)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_are_collected_in_batches() -> None:
    """Cycles, such as gRPC's server leaves after its calls, are collected in batches."""
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    most = 0
    with infrequent_gc():
        for _ in range(40_000):
            alive.add(Cycle())
            most = max(most, len(alive))
    assert 1_000 < most < 20_000, "neither a look for each of them nor one for all"


def test_existing_objects_are_excluded_from_collections() -> None:
    kept = [Cycle()]
    before = gc.get_threshold()
    with infrequent_gc():
        assert gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
