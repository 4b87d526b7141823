"""The end of a batch is reported once to every waiter: threads, coroutines and callbacks."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moonserve.protocol.errors import DeadlineExceeded, PeerLost
from moonserve.transfer import Batch
from tests.patience import PATIENCE_S
from tests.transfer.conftest import Pair


def test_a_wait_timeout_raises_and_the_batch_continues() -> None:
    released: list[bool] = []
    batch = Batch(2, 2, lambda: released.append(True))
    batch.settle_part({})
    with pytest.raises(DeadlineExceeded):
        batch.wait(0.01)
    assert not batch.done
    assert not released
    batch.settle_part({1: PeerLost("gone")})
    assert batch.done
    assert released == [True]
    for _ in range(2):
        with pytest.raises(PeerLost):
            batch.wait(0)


def test_all_waiting_threads_are_woken() -> None:
    batch = Batch(1, 1, lambda: None)
    with ThreadPoolExecutor(5) as threads:
        waits = [threads.submit(batch.wait, PATIENCE_S) for _ in range(5)]
        batch.settle_part({})
        for wait in waits:
            wait.result(PATIENCE_S)


async def test_a_batch_can_be_awaited_repeatedly_and_raises_its_first_error(pair: Pair) -> None:
    batch = pair.near.submit([pair.read(0, 0, 4096)], deadline_s=PATIENCE_S)

    async def waiter() -> None:
        await batch

    await asyncio.gather(*(waiter() for _ in range(5)))
    await batch
    assert batch.errors == (None,)
    assert pair.local.buffer[:4096] == pair.memory.buffer[:4096]
    pair.far.close()
    with pytest.raises(PeerLost):
        await pair.near.submit([pair.read(0, 0, 4096)], deadline_s=PATIENCE_S)


async def test_cancelling_a_waiter_leaves_the_batch_and_other_waiters_alone() -> None:
    batch = Batch(1, 1, lambda: None)

    async def waiter() -> str:
        await batch
        return "done"

    impatient, patient = asyncio.create_task(waiter()), asyncio.create_task(waiter())
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    threading.Thread(target=batch.settle_part, args=({},)).start()
    assert await asyncio.wait_for(patient, PATIENCE_S) == "done"


def test_a_closed_event_loop_is_not_notified() -> None:
    batch = Batch(1, 1, lambda: None)
    loop = asyncio.new_event_loop()

    async def waiter() -> None:
        await batch

    task = loop.create_task(waiter())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    batch.settle_part({})
    assert batch.done
