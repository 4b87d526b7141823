"""Real threads on one pool: no block is held by two, none is lost, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.pages import Eviction, PagePool, PoolConfig
from protocol.errors import Overloaded
from tests.engine.pages.conftest import MakeCore
from tests.patience import NEVER_S, PATIENCE_S
from tests.thoroughness import examples

NUM_BLOCKS = 512


@dataclass
class Holders:
    """Who has which block, by what callers were told. One dict operation at a time, so that threads need no lock."""

    pool: PagePool
    holder: dict[int, int] = field(default_factory=dict)  # block → request

    def took(self, request: int, blocks: list[int]) -> None:
        for block in blocks:
            assert self.holder.setdefault(block, request) == request, "a block is held twice"

    def free(self, request: int) -> None:
        """Forgets the blocks before they can be another's."""
        for block in self.pool.blocks_of(request):
            assert self.holder.pop(block) == request
        self.pool.free(request)


def run(tasks: list[Callable[[], None]]) -> None:
    """All at once, to their ends; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def singles(holders: Holders, worker: int, rounds: int) -> None:
    """Requests of some blocks that come, grow, wait for more and go."""
    rng = random.Random(worker)
    for number in range(rounds):
        request = worker << 32 | number
        wish = rng.randrange(1, 80)
        holders.took(request, holders.pool.allocate(request, wish, wait_s=NEVER_S))
        more = holders.pool.try_allocate(request, rng.randrange(1, 9), room=rng.choice([0, 32]))
        holders.took(request, more or [])
        if rng.random() < 0.3:
            holders.pool.reserve(request, rng.randrange(5))
        holders.free(request)


def batches(holders: Holders, worker: int, rounds: int) -> None:
    """Long calls, which are made without the interpreter's lock."""
    for number in range(rounds):
        first = worker << 32 | number * 1000
        requests = np.arange(first, first + 100, dtype=np.uint64)
        blocks, done = holders.pool.allocate_all(requests, 2)
        for i in range(done):
            holders.took(first + i, blocks[2 * i : 2 * i + 2].tolist())
        for i in range(done):
            for block in blocks[2 * i : 2 * i + 2].tolist():
                assert holders.holder.pop(block) == first + i
        assert holders.pool.free_all(requests) == 2 * done


def resizes(pool: PagePool, rounds: int) -> None:
    """Blocks go out of service and come back."""
    for number in range(rounds):
        gone = pool.shrink(number % 50)
        assert pool.grow(len(gone)) == len(gone)
        pool.stats(), pool.latencies()


def test_no_block_is_held_twice_and_none_is_lost(make_core: MakeCore) -> None:
    """Single calls that wait, batches and changes of size, all at once."""
    config = PoolConfig(num_blocks=NUM_BLOCKS, max_blocks=NUM_BLOCKS)
    pool = PagePool(config, core=make_core(config))
    holders = Holders(pool)
    rounds = examples(150)
    run(
        [
            *(lambda w=w: singles(holders, w, rounds) for w in range(3)),  # type: ignore[misc]
            *(lambda w=w: batches(holders, w, rounds) for w in range(3, 5)),  # type: ignore[misc]
            lambda: resizes(pool, rounds),
        ]
    )
    assert not holders.holder
    pool.validate()
    stats = pool.stats()
    assert (stats.num_blocks, stats.free, stats.requests) == (NUM_BLOCKS, NUM_BLOCKS, 0)
    assert stats.allocated == stats.freed


def test_evictions_are_told_once_each(make_core: MakeCore) -> None:
    """Requests at rest are evicted by any thread; each ends by its owner or by eviction, not by both."""
    evicted: list[int] = []
    config = PoolConfig(num_blocks=64, eviction=Eviction.LRU)
    pool = PagePool(config, core=make_core(config), on_evicted=evicted.extend)
    kept: list[int] = []

    def task(worker: int) -> None:
        rng = random.Random(worker)
        for number in range(examples(300)):
            request = worker << 32 | number
            try:
                pool.allocate(request, rng.randrange(1, 8))
            except Overloaded:  # the others run
                continue
            if rng.random() < 0.2:
                assert pool.free(request)
            else:
                kept.append(request)
                assert pool.rest(request)

    run([lambda w=w: task(w) for w in range(4)])  # type: ignore[misc]
    pool.validate()
    there = [request for request in kept if pool.blocks_of(request)]
    assert sorted(evicted + there) == sorted(kept)


def test_pins_hold_against_other_threads(make_core: MakeCore) -> None:
    """What one pinned at rest is there when it wakes it, whatever the others evict."""
    config = PoolConfig(num_blocks=40, eviction=Eviction.FIFO, wait_s=NEVER_S)
    pool = PagePool(config, core=make_core(config))

    def task(worker: int) -> None:
        for number in range(examples(300)):
            request = worker << 32 | number
            blocks = pool.allocate(request, 3)
            assert pool.pin(request)
            pool.rest(request)
            assert pool.blocks_of(request) == blocks
            assert pool.wake(request)
            pool.unpin(request)
            pool.rest(request)

    run([lambda w=w: task(w) for w in range(4)])  # type: ignore[misc]
    pool.validate()


def test_short_calls_get_through_while_long_ones_are_made(make_core: MakeCore) -> None:
    """They are made again without the interpreter's lock when another thread is inside: both go on."""
    config = PoolConfig(num_blocks=10_000)
    pool = PagePool(config, core=make_core(config))
    requests = np.arange(5_000, dtype=np.uint64)
    ended = threading.Event()

    def long() -> None:
        try:
            for _ in range(5):
                assert pool.allocate_all(requests, 1)[1] == len(requests)
                assert pool.free_all(requests) == len(requests)
        finally:
            ended.set()

    def short(request: int) -> None:
        while not ended.is_set():
            pool.allocate(request)
            assert pool.rest(request)
            assert pool.free(request) == 1

    run([long, lambda: short(1 << 40), lambda: short(2 << 40)])
    pool.validate()
    assert pool.stats().free == 10_000
