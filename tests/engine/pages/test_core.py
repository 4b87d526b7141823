"""What the books promise, of the core in C and of its twin."""

from __future__ import annotations

import numpy as np
import pytest

from engine.pages.base import MAX_PINS, Eviction, Mark, PageCore, PoolConfig, Wish
from engine.pages.latency import percentile_s
from tests.engine.pages.conftest import MakeCore

A, B, C, D = 7, 2**64 - 1, 0, 1 << 40


def take(core: PageCore, request: int, count: int, priority: int = 0, room: int = 0) -> list[int]:
    blocks = core.allocate(Wish(request, count, priority, room))
    core.validate()
    assert blocks is not None
    return blocks


def test_what_is_allocated_is_held_until_it_is_freed(make_core: MakeCore) -> None:
    """Every block is handed out once, and all come back with their request."""
    core = make_core(PoolConfig(num_blocks=10))
    blocks = take(core, A, 4) + take(core, B, 6)
    assert sorted(blocks) == list(range(10))
    assert core.allocate_plain(C, 1, 0) is None
    assert core.free(A) == 4
    core.validate()
    assert core.stats().free == 4
    assert core.free(A) == 0
    assert core.blocks_of(A) is None
    assert sorted(take(core, C, 4)) == sorted(blocks[:4])


def test_a_request_is_extended_beside_its_last_block(make_core: MakeCore) -> None:
    """As long as what lies there is free, whatever else is."""
    core = make_core(PoolConfig(num_blocks=200))
    first = take(core, A, 2, room=16)
    take(core, B, 3, room=16)
    more = take(core, A, 5)
    assert more == list(range(first[-1] + 1, first[-1] + 6))
    assert take(core, C, 1) == [7]  # what lies beside it is nobody's
    assert take(core, A, 1) == [8]
    assert core.blocks_of(A).tolist() == [*first, *more, 8]  # type: ignore[union-attr]
    assert core.stats().runs == 4


def test_room_keeps_a_place_to_grow_into(make_core: MakeCore) -> None:
    """Requests that say how many blocks they will want stay in one piece while they grow in turns."""
    core = make_core(PoolConfig(num_blocks=1024))
    for _ in range(16):
        for request in range(64):
            take(core, request, 1, room=16)
    assert core.stats().runs == 64


def test_long_runs_are_found_behind_short_gaps(make_core: MakeCore) -> None:
    """A request of many words lies in one piece although the lowest free blocks are scattered."""
    core = make_core(PoolConfig(num_blocks=4096))
    for request in range(2048):
        core.allocate_plain(request, 1, 0)
    for request in range(0, 2048, 2):
        core.free(request)
    take(core, A << 20, 1000)
    assert core.stats().runs == 1024 + 1


def test_many_are_allocated_in_order_until_one_cannot_be(make_core: MakeCore) -> None:
    """The blocks of a batch come one request's behind another's, and the rest of it is untouched."""
    core = make_core(PoolConfig(num_blocks=10))
    requests = np.array([A, B, A, C, D], np.uint64)
    blocks, done = core.allocate_all(requests, np.array([3, 2, 2, 5, 1], np.uint32), 0, 0)
    core.validate()
    assert (done, len(set(blocks.tolist()))) == (3, 7)
    assert core.blocks_of(A).tolist() == blocks[[0, 1, 2, 5, 6]].tolist()  # type: ignore[union-attr]
    assert core.blocks_of(C) is None
    assert core.free_all(requests) == 7
    core.validate()


def test_a_request_that_must_exist_is_not_made(make_core: MakeCore) -> None:
    """It may have been evicted; its owner has to know."""
    core = make_core(PoolConfig(num_blocks=10))
    with pytest.raises(LookupError):
        core.extend_plain(A, 1)
    with pytest.raises(LookupError):
        core.allocate(Wish(A, 1, existing=True))
    assert core.stats().requests == 0


def test_more_requests_than_were_planned_for_are_refused(make_core: MakeCore) -> None:
    """A request of the table's last place goes before another comes."""
    core = make_core(PoolConfig(num_blocks=10, max_requests=2))
    take(core, A, 1), take(core, B, 1)
    assert core.allocate(Wish(C, 1)) is None
    core.mark(B, Mark.REST)
    assert core.allocate_evicting(Wish(C, 1)) == ([1], [B])


def test_a_prefix_outlives_its_request(make_core: MakeCore) -> None:
    """Its blocks are another's, with the same priority; the rest stays, and goes by itself."""
    core = make_core(PoolConfig(num_blocks=8, max_requests=2))
    blocks = take(core, A, 5, priority=1)
    assert core.hand_over(A, B, 2)
    core.validate()
    assert core.blocks_of(B).tolist() == blocks[:2]  # type: ignore[union-attr]
    assert core.blocks_of(A).tolist() == blocks[2:]  # type: ignore[union-attr]
    assert (core.stats().runs, core.stats().held_high) == (2, 5)
    assert not core.hand_over(A, C, 1)  # no third request can come
    assert core.free(A) == 3
    assert core.hand_over(B, C, 2)
    core.validate()
    assert core.blocks_of(B) is None
    for request, to, count in ((C, D, 3), (C, C, 1), (B, D, 1), (C, D, 0)):
        with pytest.raises(LookupError):
            core.hand_over(request, to, count)


# -- shares and promises


def test_a_share_is_left_to_high_requests(make_core: MakeCore) -> None:
    """The others hold at most the rest, also when the high ones hold more than their share."""
    core = make_core(PoolConfig(num_blocks=10, high_share=0.4))
    take(core, A, 6)
    assert core.allocate(Wish(B, 1)) is None
    take(core, C, 3, priority=1)
    take(core, C, 1)  # it is high, whoever extends it
    core.free(A)
    take(core, D, 5, priority=9)
    assert core.allocate(Wish(B, 2)) is None
    take(core, B, 1)


def test_a_promise_is_kept_from_others_and_to_its_request(make_core: MakeCore) -> None:
    """What is promised is free, but only for the one."""
    core = make_core(PoolConfig(num_blocks=10))
    assert core.reserve(A, 6, 0)
    core.validate()
    assert core.allocate(Wish(B, 5)) is None
    take(core, B, 4)
    core.set_barrier(99)
    assert len(take(core, A, 4)) == 4  # neither does it queue for it
    core.set_barrier(0)
    assert core.stats().promised == 2
    assert not core.reserve(A, 3, 0)
    assert core.reserve(A, 0, 0)
    assert core.stats().promised == 0
    core.free(A), core.free(B)
    assert core.reserve(C, 3, 0)
    assert core.reserve(C, 0, 0)  # a request of nothing is none
    assert core.stats().requests == 0
    core.validate()


# -- eviction

USES = ((A, 3), (B, 1), (C, 2))  # in the order in which they come; how often each runs


@pytest.mark.parametrize(
    ("policy", "order"),
    [(Eviction.LRU, [C, B, A]), (Eviction.LFU, [B, C, A]), (Eviction.FIFO, [A, B, C])],
)
def test_requests_at_rest_go_in_the_order_of_the_policy(
    make_core: MakeCore, policy: Eviction, order: list[int]
) -> None:
    """LRU: the longest at rest. LFU: the least often used. FIFO: the first that came."""
    core = make_core(PoolConfig(num_blocks=3, eviction=policy))
    for request, uses in USES:
        take(core, request, 1)
        for _ in range(uses - 1):
            core.mark(request, Mark.REST), core.mark(request, Mark.WAKE)
    for request in (C, B, A):
        core.mark(request, Mark.REST)
    blocks, evicted = core.allocate_evicting(Wish(D, 3))
    core.validate()
    assert (sorted(blocks or []), evicted) == ([0, 1, 2], order)


def test_busy_and_pinned_requests_stay(make_core: MakeCore) -> None:
    """And nobody goes in vain: when all that may go is too little, all stay."""
    core = make_core(PoolConfig(num_blocks=4, eviction=Eviction.LRU))
    for request in (A, B, C, D):
        take(core, request, 1)
    for request in (A, B, C):
        core.mark(request, Mark.REST)
    core.mark(A, Mark.PIN), core.mark(A, Mark.PIN), core.mark(A, Mark.UNPIN)
    core.mark(B, Mark.WAKE)
    assert core.allocate_evicting(Wish(9, 2)) == (None, [])
    blocks, evicted = core.allocate_evicting(Wish(9, 1))
    assert (blocks, evicted) == ([2], [C])
    core.mark(A, Mark.UNPIN)
    core.validate()
    assert core.allocate_evicting(Wish(9, 1))[1] == [A]


def test_who_asks_is_not_evicted_for_it(make_core: MakeCore) -> None:
    """A request at rest that grows is awake then, and keeps what it has if it cannot."""
    core = make_core(PoolConfig(num_blocks=4, eviction=Eviction.LRU))
    take(core, A, 2), take(core, B, 2)
    core.mark(A, Mark.REST)
    assert core.allocate_evicting(Wish(A, 1)) == (None, [])
    core.validate()
    assert core.stats().evictable == 1
    core.mark(B, Mark.REST)
    assert core.allocate_evicting(Wish(A, 2)) == ([2, 3], [B])
    core.validate()
    assert core.stats().evictable == 0


def test_normal_requests_evict_no_high_ones(make_core: MakeCore) -> None:
    """High ones evict normal ones first, and then their like."""
    core = make_core(PoolConfig(num_blocks=4, eviction=Eviction.LRU))
    take(core, A, 2, priority=1), take(core, B, 2)
    core.mark(A, Mark.REST), core.mark(B, Mark.REST)
    assert core.allocate_evicting(Wish(C, 3)) == (None, [])
    assert core.allocate_evicting(Wish(C, 3, priority=1))[1] == [B, A]
    core.validate()


def test_more_evictions_than_one_call_tells_of(make_core: MakeCore) -> None:
    """Thousands go for one large request, and each is told."""
    core = make_core(PoolConfig(num_blocks=3000, eviction=Eviction.FIFO))
    for request in range(3000):
        core.allocate_plain(request, 1, 0)
        core.mark(request, Mark.REST)
    blocks, evicted = core.allocate_evicting(Wish(A << 30, 2500))
    core.validate()
    assert len(blocks or []) == 2500
    assert evicted == list(range(2500))


def test_pins_are_counted(make_core: MakeCore) -> None:
    """Too many and too few are told, and so is a request that is not there."""
    core = make_core(PoolConfig(num_blocks=4))
    take(core, A, 1)
    assert core.mark(A, Mark.UNPIN) is False
    assert all(core.mark(A, Mark.PIN) for _ in range(MAX_PINS))
    assert core.mark(A, Mark.PIN) is False
    assert [core.mark(B, mark) for mark in Mark] == [None] * 4


# -- size


def test_a_pool_shrinks_by_what_is_free_and_grows_again(make_core: MakeCore) -> None:
    """Blocks at the end are gone, those in between retired, and these come back first."""
    core = make_core(PoolConfig(num_blocks=8, max_blocks=12))
    take(core, A, 2), take(core, B, 1), take(core, C, 1), take(core, C, 2)  # 6 and 7 are free
    core.free(B)
    assert core.shrink(100).tolist() == [7, 6, 2]
    core.validate()
    stats = core.stats()
    assert (stats.end, stats.retired, stats.num_blocks, stats.free) == (6, 1, 5, 0)
    assert core.allocate(Wish(D, 1)) is None
    assert core.grow(2) == 2
    core.validate()
    assert sorted(take(core, D, 2)) == [2, 6]
    assert core.grow(100) == 5
    core.validate()
    assert core.stats().num_blocks == 12


def test_promised_blocks_stay_in_service(make_core: MakeCore) -> None:
    """A promise is of blocks that are there."""
    core = make_core(PoolConfig(num_blocks=8))
    assert core.reserve(A, 5, 0)
    assert len(core.shrink(8)) == 3
    core.validate()
    assert len(take(core, A, 5)) == 5


def test_what_is_freed_last_lets_the_end_come_down(make_core: MakeCore) -> None:
    """Retired blocks below the end go with it."""
    core = make_core(PoolConfig(num_blocks=130))
    blocks = take(core, A, 129) + take(core, B, 1)
    assert blocks[-1] == 129
    core.free(A)
    core.shrink(100)
    assert core.stats().end == 130
    core.free(B)
    core.shrink(30)
    core.validate()
    assert (core.stats().end, core.stats().num_blocks) == (0, 0)


# -- turns and figures


def test_below_the_barrier_one_waits(make_core: MakeCore) -> None:
    """Newcomers queue behind those who wait; who holds something goes before newcomers of its priority."""
    core = make_core(PoolConfig(num_blocks=8))
    take(core, A, 1)
    core.set_barrier(1)  # a newcomer of priority 0 waits
    assert core.allocate(Wish(B, 1)) is None
    assert core.allocate(Wish(B, 1, ahead=True)) is not None
    assert core.allocate(Wish(A, 1)) is not None
    assert core.allocate(Wish(C, 1, priority=1)) is not None
    assert [core.rank_of(request, 1) for request in (A, C, D)] == [1, 3, 2]


def test_allocations_are_timed(make_core: MakeCore) -> None:
    """Each one, alone or of a batch; percentiles do not fall."""
    core = make_core(PoolConfig(num_blocks=1000))
    for request in range(100):
        core.allocate_plain(request, 1, 0)
    core.allocate_all(np.arange(200, 300, dtype=np.uint64), np.ones(100, np.uint32), 0, 0)
    counts = core.latencies()
    assert counts.sum() == 200
    assert 0 < percentile_s(counts, 50) <= percentile_s(counts, 99) <= percentile_s(counts, 99.9)


def test_books_tell_what_happened(make_core: MakeCore) -> None:
    """Every counter is of something."""
    core = make_core(PoolConfig(num_blocks=4, eviction=Eviction.LRU))
    take(core, A, 2), take(core, A, 1)
    core.allocate(Wish(B, 2))
    core.mark(A, Mark.REST)
    core.allocate_evicting(Wish(B, 2))
    core.free(B)
    stats = core.stats()
    assert (stats.allocations, stats.allocated, stats.freed) == (3, 5, 5)
    assert (stats.refusals, stats.evictions, stats.evicted_blocks, stats.in_place) == (1, 1, 3, 1)
