"""What the pool adds to its books: refusals that tell, waiting in turn, telling of evictions, empty blocks."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from engine.pages import Eviction, PagePool, PoolConfig
from engine.pages import pool as pool_module
from engine.pages.waiting import Waiter
from engine.pages.zeroing import BlockMemory
from protocol.errors import DeadlineExceeded, Overloaded
from tests.engine.pages.conftest import MakeCore
from tests.engine.pages.waiting_threads import Waiting
from tests.patience import NEVER_S

A, B, C, D, E = 1, 2, 3, 4, 5


def make_pool(make_core: MakeCore, config: PoolConfig, **further: object) -> PagePool:
    return PagePool(config, core=make_core(config), **further)  # type: ignore[arg-type]


def test_who_is_refused_is_told_why_and_when_to_come_back(make_core: MakeCore) -> None:
    """The message has the figures; the time is from what came back so far."""
    now = 0.0
    pool = make_pool(make_core, PoolConfig(num_blocks=10, high_share=0.2), clock=lambda: now)
    pool.allocate(A, 8)
    with pytest.raises(Overloaded, match=r"2 of 10 are free.*20 % reserved.*grow the pool") as told:
        pool.allocate(B)
    assert told.value.ids == {"request": str(B)}
    assert told.value.retry_after_s == 30.0
    pool.free(A)
    pool.allocate(C, 8)
    now = 4.0
    with pytest.raises(Overloaded) as told:
        pool.allocate(B, 3)
    assert told.value.retry_after_s == pytest.approx(1.5)  # 8 blocks came back in 4 s
    assert pool.try_allocate(B) is None
    pool.validate()


@pytest.mark.parametrize(
    ("request_", "count", "priority", "room"),
    [(-1, 1, 0, 0), (2**64, 1, 0, 0), (A, 0, 0, 0), (A, 1, 256, 0), (A, 1, -1, 0), (A, 1, 0, -1)],
)
def test_what_cannot_be_asked_for_is_a_value_error(
    make_core: MakeCore, request_: int, count: int, priority: int, room: int
) -> None:
    """C would take it for something else."""
    pool = make_pool(make_core, PoolConfig(num_blocks=4))
    with pytest.raises(ValueError, match=r"from|below"):
        pool.allocate(request_, count, priority=priority, room=room)
    with pytest.raises(ValueError, match=r"from|below"):
        pool.try_allocate(request_, count, priority=priority, room=room)
    assert pool.stats().requests == 0


def test_misuse_is_told(make_core: MakeCore) -> None:
    """By what is wrong with it."""
    pool = make_pool(make_core, PoolConfig(num_blocks=4))
    pool.allocate(A)
    with pytest.raises(ValueError, match="holds nothing here"):
        pool.extend(B)
    with pytest.raises(ValueError, match="holds nothing here"):
        pool.extend(B, room=8)
    with pytest.raises(ValueError, match="no pin"):
        pool.unpin(A)
    for call in (pool.free, pool.rest, pool.blocks_of):
        with pytest.raises(ValueError, match=r"below 2\*\*64"):
            call(-1)
    for resize in (pool.grow, pool.shrink):
        with pytest.raises(ValueError, match="a number of blocks"):
            resize(-1)
    with pytest.raises(ValueError, match="cannot be promised"):
        pool.reserve(A, -1)
    with pytest.raises(ValueError, match="uint64"):
        pool.allocate_all(np.arange(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one count"):
        pool.allocate_all(np.arange(3, dtype=np.uint64), [1, 2])
    for counts in ([1, 0], [1, -1], np.array([0, 1], np.uint32)):
        with pytest.raises(ValueError, match=r"from 1|1 at least"):
            pool.allocate_all(np.arange(2, dtype=np.uint64), counts)  # type: ignore[arg-type]
    assert pool.blocks_of(B) == []
    assert not pool.rest(B)
    with pytest.raises(ValueError, match="it has fewer, or 2 is there already"):
        pool.hand_over(A, B, 2)
    assert pool.hand_over(A, B)


@pytest.mark.parametrize(
    "further",
    [
        {"num_blocks": 0},
        {"max_blocks": 9},
        {"max_requests": 0},
        {"high_share": 1.5},
        {"max_waiting": -1},
        {"num_blocks": 2**31},
    ],
)
def test_a_pool_that_cannot_be_is_refused(further: dict[str, float]) -> None:
    """Before memory is taken."""
    with pytest.raises(ValueError, match=r"must be|share|below 0"):
        PoolConfig(**{"num_blocks": 10, **further})  # type: ignore[arg-type]


def test_batches_and_promises_through_the_pool(make_core: MakeCore) -> None:
    """One count for all, or one each; extensions; fragmentation."""
    pool = make_pool(make_core, PoolConfig(num_blocks=100))
    assert pool.fragmentation() == 0.0
    requests = np.array([A, B], np.uint64)
    blocks, done = pool.allocate_all(requests, 2)
    assert (blocks.tolist(), done) == ([0, 1, 2, 3], 2)
    assert pool.reserve(C, 95)
    assert pool.extend(A) == [4]
    assert pool.fragmentation() == 1.0  # three runs, and three requests
    with pytest.raises(Overloaded, match="95 of these promised"):
        pool.allocate(B)
    assert len(pool.extend(C, 95)) == 95
    assert pool.free_all(np.array([A, B, C, D], np.uint64)) == 100
    pool.validate()


# -- eviction


def test_owners_are_told_of_evictions_before_anybody_writes(make_core: MakeCore) -> None:
    """Also when the allocation waited for it."""
    evicted: list[int] = []
    config = PoolConfig(num_blocks=4, eviction=Eviction.LRU)
    pool = make_pool(make_core, config, on_evicted=evicted.extend)
    pool.allocate(A, 2), pool.allocate(B, 2)
    pool.rest(A)
    assert pool.allocate(C, 1) is not None
    assert evicted == [A]
    assert pool.free(A) == 0
    with Waiting(pool._core) as waiting:
        waiting.begin("D", lambda: (pool.allocate(D, 2, wait_s=NEVER_S), list(evicted)))
        pool.rest(B)
    blocks, told = waiting.outcomes["D"]  # type: ignore[misc]
    assert (len(blocks), told) == (2, [A, B])
    pool.validate()


# -- waiting


def test_blocks_that_come_back_end_a_wait(make_core: MakeCore) -> None:
    """Freed, grown or no longer promised: whoever waits gets them."""
    pool = make_pool(make_core, PoolConfig(num_blocks=4, max_blocks=6, wait_s=NEVER_S))
    pool.allocate(A, 4)
    with Waiting(pool._core) as waiting:
        waiting.begin("grown", lambda: pool.allocate(B, 2))
        assert pool.num_waiting == 1
        pool.grow(2)
    assert len(waiting.outcomes["grown"]) == 2  # type: ignore[arg-type]
    with Waiting(pool._core) as waiting:
        waiting.begin("freed", lambda: pool.extend(B, 3))
        pool.free_all(np.array([A], np.uint64))
    assert len(waiting.outcomes["freed"]) == 3  # type: ignore[arg-type]
    pool.reserve(C, 1)
    with Waiting(pool._core) as waiting:
        waiting.begin("promised", lambda: pool.allocate(D))
        pool.reserve(C, 0)
    assert len(waiting.outcomes["promised"]) == 1  # type: ignore[arg-type]
    assert pool.num_waiting == 0
    pool.validate()


def test_who_waits_is_served_by_priority_and_then_in_turn(make_core: MakeCore) -> None:
    """Who holds something goes before newcomers of its priority."""
    pool = make_pool(make_core, PoolConfig(num_blocks=2))
    pool.allocate(A), pool.allocate(E)
    order: list[str] = []

    def take(name: str, request: int, priority: int = 0) -> None:
        pool.allocate(request, priority=priority, wait_s=NEVER_S)
        order.append(name)
        pool.free(request)

    with Waiting(pool._core) as waiting:
        waiting.begin("first", lambda: take("first", B))
        waiting.begin("second", lambda: take("second", C))
        waiting.begin("holder", lambda: take("holder", E))
        waiting.begin("high", lambda: take("high", D, priority=1))
        pool.free(A)
    assert order[:2] == ["high", "holder"]
    assert set(order[2:]) == {"first", "second"}  # two blocks came back at once
    assert not any(waiting.outcomes.values())
    pool.validate()


def test_what_is_too_little_for_the_first_is_saved_up_for_it(make_core: MakeCore) -> None:
    """Small requests that come later do not starve a large one; a high one may pass."""
    pool = make_pool(make_core, PoolConfig(num_blocks=4))
    pool.allocate(A, 2), pool.allocate(B, 2)
    with Waiting(pool._core) as waiting:
        waiting.begin("large", lambda: pool.allocate(C, 4, wait_s=NEVER_S))
        pool.free(A)
        assert pool.try_allocate(D) is None
        assert pool.try_allocate(E, priority=1) is not None
        pool.free(E)
        pool.free(B)
    assert len(waiting.outcomes["large"]) == 4  # type: ignore[arg-type]
    pool.validate()


def test_a_wait_ends_by_its_deadline_and_lets_the_next_one_go(make_core: MakeCore) -> None:
    """What the first could not have may be enough for the second."""
    pool = make_pool(make_core, PoolConfig(num_blocks=4))
    pool.allocate(A, 2)
    with pytest.raises(DeadlineExceeded, match="wait longer"):
        pool.allocate(B, 3, wait_s=0.001)
    assert pool.num_waiting == 0
    assert len(pool.allocate(B, 2)) == 2
    pool.validate()


def test_a_line_is_bounded(make_core: MakeCore) -> None:
    """One more than may wait is refused at once."""
    pool = make_pool(make_core, PoolConfig(num_blocks=1, max_waiting=1, wait_s=NEVER_S))
    pool.allocate(A)
    with Waiting(pool._core) as waiting:
        waiting.begin("B", lambda: pool.allocate(B))
        with pytest.raises(Overloaded, match="1 allocations wait already"):
            pool.allocate(C)
        pool.free(A)
    assert waiting.outcomes["B"] == [0]


def test_who_loses_its_request_while_it_waits_is_told(make_core: MakeCore) -> None:
    """An extension of what was freed is none."""
    pool = make_pool(make_core, PoolConfig(num_blocks=2))
    pool.allocate(A), pool.allocate(B)
    with Waiting(pool._core) as waiting:
        waiting.begin("A", lambda: pool.extend(A, 2, wait_s=NEVER_S))
        pool.free(A)
    assert isinstance(waiting.outcomes["A"], ValueError)
    assert pool.num_waiting == 0
    pool.validate()


def test_who_is_interrupted_while_it_waits_leaves_the_line(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those behind it go on."""

    class Interrupted(Waiter):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self.done.wait = self._interrupt  # type: ignore[assignment]

        def _interrupt(self, _timeout: float) -> None:
            raise KeyboardInterrupt

    pool = make_pool(make_core, PoolConfig(num_blocks=2))
    pool.allocate(A)
    monkeypatch.setattr(pool_module, "Waiter", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(B, 2, wait_s=NEVER_S)
    assert pool.num_waiting == 0
    assert len(pool.allocate(C)) == 1
    pool.validate()


# -- empty blocks


def test_blocks_are_handed_out_empty(make_core: MakeCore) -> None:
    """Whatever was in them; nobody else's bytes are touched."""
    num_blocks, piece_bytes, pieces = 12, 64, 4
    memory = memoryview(mmap.mmap(-1, num_blocks * piece_bytes * pieces))
    view = np.frombuffer(memory, np.uint8).reshape(pieces, num_blocks, piece_bytes)
    zero = BlockMemory(memory, num_blocks, piece_bytes, pieces)
    pool = make_pool(make_core, PoolConfig(num_blocks=num_blocks), zero=zero)
    kept = pool.allocate(A, 3)
    view[:] = 7
    blocks = [*pool.allocate(B, 2), *pool.allocate(C, 1, room=4), *pool.extend(B), 11]
    more, _ = pool.allocate_all(np.array([D, E], np.uint64), 1)
    for block in range(num_blocks):
        empty = block in blocks[:-1] or block in more
        assert bool((view[:, block] == (0 if empty else 7)).all()), block
    assert not set(kept) & set(blocks)


def test_memory_that_is_too_small_or_read_only_is_refused() -> None:
    """It would be somebody else's bytes."""
    for memory in (memoryview(bytearray(10)), memoryview(bytes(100))):
        with pytest.raises(ValueError, match="writable bytes"):
            BlockMemory(memory, 10, 2, 1)
