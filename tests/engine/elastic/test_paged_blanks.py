"""A pool whose memory comes and goes by pages: random use, limits and late work, and what each is worth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.elastic.actions import Reserve
from engine.elastic.paged_blanks import GiveBack, PagedBlanks, Populate
from engine.elastic.pages import PageState
from engine.elastic.paging import Paging
from engine.elastic.supply import Unshared
from protocol.errors import ConfigError
from protocol.ids import BlockId
from protocol.keys import NO_PARENT, BlockKey
from protocol.layout import KvLayout
from tests.engine.elastic.shapes import LAYOUT, PAGE, paging
from tests.thoroughness import examples

NUM_PAGES, PER_PAGE = 6, 3
NUM_BLOCKS = NUM_PAGES * PER_PAGE


def make(
    reserve: Reserve | None = None, *, on_work: Callable[[], None] = lambda: None
) -> tuple[BlockPool, PagedBlanks]:
    shape = paging(NUM_PAGES, blocks_per_page=PER_PAGE, frames_per_page=1)
    blanks = PagedBlanks(
        shape,
        Unshared(NUM_PAGES),
        reserve=reserve or Reserve(low=0, high=0, idle_s=1.0),
        on_work=on_work,
    )
    pool = BlockPool(NUM_BLOCKS, on_added=lambda *_: None, on_removed=lambda _: None, blanks=blanks)
    return pool, blanks


def settle(blanks: PagedBlanks, now: float = 0.0) -> list[Populate | GiveBack]:
    done: list[Populate | GiveBack] = []
    while (action := blanks.next_action(now)) is not None:
        done.append(action)
        if isinstance(action, GiveBack):
            blanks.given_back(action)
        blanks.validate()
    return done


def keys(count: int, seed: int = 0) -> list[BlockKey]:
    return [BlockKey(bytes([seed + 1, i]) + bytes(14)) for i in range(count)]


def publish(pool: BlockPool, blocks: list[BlockId], seed: int = 0) -> None:
    chain = keys(len(blocks), seed)
    for index, block in enumerate(blocks):
        pool.publish(block, chain[index], chain[index - 1] if index else NO_PARENT, index)


class PagedPool(RuleBasedStateMachine):
    """Sequences come and go, cache and find; the ceiling moves; pages are given back late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held: list[list[BlockId]] = []
        self.leaving: list[GiveBack] = []
        self.num_published = 0

    @initialize(low=st.integers(0, 2), extra=st.integers(0, 2))
    def begin(self, low: int, extra: int) -> None:
        self.pool, self.blanks = make(Reserve(low=low, high=low + extra, idle_s=3.0))

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        self.pool.make_way()  # as workers do with every event
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks:
            assert len(set(blocks)) == count
            pages = {block // PER_PAGE for block in blocks}
            states = {self.blanks._pages.state(page) for page in pages}
            assert states == {PageState.MAPPED}
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), caches=st.booleans())
    def release(self, data: st.DataObject, caches: bool) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if caches and self.pool.key_of(blocks[0]) is None:
            self.num_published += 1
            publish(self.pool, blocks, self.num_published % 200)
        self.pool.release(blocks)

    @rule(seed=st.integers(0, 199))
    def find(self, seed: int) -> None:
        found = self.pool.match_prefix(keys(8, seed))
        if found:
            self.pool.retain(found)
            self.held.append(found)

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def limit(self, num_pages: int) -> None:
        self.blanks.limit(num_pages)
        in_the_way = self.pool.make_way()
        held = {block for blocks in self.held for block in blocks}
        assert in_the_way <= held
        staying = self.blanks.num_held_pages - self.blanks._pages.num_leaving
        assert staying - len(self.blanks._pages.leaving) <= num_pages
        for block in in_the_way:
            assert self.pool.key_of(block) is None, "nobody new may find it"

    @rule(seconds=st.floats(0.0, 5.0))
    def begin_work(self, seconds: float) -> None:
        self.now += seconds
        action = self.blanks.next_action(self.now)
        if isinstance(action, GiveBack):
            self.leaving.append(action)

    @precondition(lambda self: self.leaving)
    @rule()
    def end_work(self) -> None:
        self.blanks.given_back(self.leaving.pop())

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "pool"):
            self.pool.validate()
            self.blanks.validate()
            assert self.pool.num_free + self.pool.num_held <= NUM_BLOCKS
            assert self.pool.num_held <= NUM_BLOCKS

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for blocks in self.held:
            self.pool.release(blocks)
        for action in self.leaving:
            self.blanks.given_back(action)
        self.pool.make_way()
        settle(self.blanks, self.now)
        assert self.blanks.num_held_pages <= self.blanks.ceiling
        self.blanks.limit(NUM_PAGES)
        everything = self.pool.allocate(NUM_BLOCKS)
        assert everything is not None
        self.pool.release(everything)
        settle(self.blanks, self.now)
        settle(self.blanks, self.now + 10.0)
        assert self.blanks.num_held_pages == 0


PagedPool.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=30, deadline=None
)
test_nothing_is_lost_whatever_comes_and_goes = PagedPool.TestCase


def test_pages_are_taken_only_for_blocks_and_given_back_when_they_are_blank() -> None:
    pool, blanks = make()
    assert (pool.num_free, blanks.num_held_pages) == (NUM_BLOCKS, 0)
    blocks = pool.allocate(PER_PAGE + 1)
    assert blocks is not None
    assert blanks.num_held_pages == 2
    pool.release(blocks)
    assert settle(blanks) == [GiveBack(page=page) for page in (1, 0)] or settle(blanks) == []
    assert (pool.num_free, blanks.num_held_pages) == (NUM_BLOCKS, 0)


def test_cached_blocks_keep_their_pages_until_somebody_needs_them() -> None:
    pool, blanks = make()
    blocks = pool.allocate(PER_PAGE)
    assert blocks is not None
    publish(pool, blocks)
    pool.release(blocks)
    settle(blanks, 100.0)
    assert blanks.num_held_pages == 1
    assert pool.match_prefix(keys(PER_PAGE)) == blocks


def test_a_few_pages_are_populated_ahead_while_blocks_come_and_go_and_none_when_they_do_not() -> (
    None
):
    pool, blanks = make(Reserve(low=2, high=3, idle_s=5.0))
    blocks = pool.allocate(1)
    assert blocks is not None
    ahead = settle(blanks, 1.0)
    assert len(ahead) == 2
    assert all(isinstance(action, Populate) for action in ahead)
    assert blanks.wake_at() == 6.0
    settle(blanks, 6.0)
    assert blanks.num_held_pages == 1
    assert blanks.wake_at() is None


def test_a_lower_ceiling_forgets_what_is_cached_and_names_what_is_held() -> None:
    pool, blanks = make()
    held, cached = pool.allocate(PER_PAGE), pool.allocate(2 * PER_PAGE)
    assert held is not None
    assert cached is not None
    publish(pool, cached)
    pool.release(cached)
    blanks.limit(1)
    assert pool.make_way() == set()
    settle(blanks)
    assert (blanks.num_held_pages, pool.num_cached, pool.num_free) == (1, 0, 0)
    other = pool.allocate(1)
    assert other is None
    assert pool.capacity == PER_PAGE


def test_held_blocks_in_the_way_are_not_found_again_and_leave_with_their_holder() -> None:
    pool, blanks = make()
    first, second = pool.allocate(PER_PAGE), pool.allocate(1)
    assert first is not None
    assert second is not None
    publish(pool, second)
    blanks.limit(1)
    assert pool.make_way() == set(second)
    assert pool.match_prefix(keys(1)) == []
    pool.release(second)
    assert pool.make_way() == set()
    settle(blanks)
    assert blanks.num_held_pages == 1
    assert {block // PER_PAGE for block in first} == {0}


def test_a_ceiling_that_is_raised_again_keeps_what_has_not_left() -> None:
    pool, blanks = make()
    blocks = pool.allocate(2 * PER_PAGE)
    assert blocks is not None
    blanks.limit(1)
    assert len(pool.make_way()) == PER_PAGE
    blanks.limit(2)
    assert pool.make_way() == set()
    assert pool.num_free == 0
    blanks.limit(3)
    assert pool.num_free == PER_PAGE


@pytest.mark.parametrize("nbytes", [1 << 20, 16 << 20, 100 << 20])
def test_pages_of_a_worker_are_whole_pages_of_the_kernel_and_many(nbytes: int) -> None:
    shape = Paging.within(LAYOUT, nbytes)
    assert shape.span_bytes % PAGE == 0
    assert shape.span_bytes == shape.blocks_per_page * LAYOUT.piece_bytes
    assert shape.range_bytes <= nbytes < shape.range_bytes + shape.page_bytes
    assert shape.num_pages >= 16
    assert LAYOUT.pool_bytes(shape.num_blocks) == shape.range_bytes


def test_memory_that_holds_no_page_is_refused() -> None:
    odd = KvLayout(num_layers=4, block_size=16, num_kv_heads=1, head_dim=20, dtype="float32")
    with pytest.raises(ConfigError, match="do not hold a page"):
        Paging.within(odd, 10_000)


def test_a_pool_takes_over_what_can_be_found_and_the_memory_of_nothing_else() -> None:
    pool, blanks = make()
    cached, left_behind = pool.allocate(2), pool.allocate(PER_PAGE)
    assert cached is not None
    assert left_behind is not None
    publish(pool, cached)
    pool.release(cached)
    later = BlockPool(
        NUM_BLOCKS, on_added=lambda *_: None, on_removed=lambda _: None, blanks=blanks
    )
    later.take_over(pool)
    later.validate()
    settle(blanks, 100.0)
    settle(blanks, 200.0)
    assert blanks.num_held_pages == 1
    assert later.match_prefix(keys(2)) == cached
    assert later.num_free == NUM_BLOCKS
