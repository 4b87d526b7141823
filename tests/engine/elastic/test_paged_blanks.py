"""Pool over elastic memory: random use, limits, requests of other workers, late give-backs, and the layout of pages."""

from __future__ import annotations

import math
import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.elastic.paged_blanks import GiveBack, PagedBlanks, Populate, Reserve, Supply
from engine.elastic.pages import PageState, Paging
from protocol.errors import ConfigError
from protocol.ids import BlockId
from protocol.keys import NO_PARENT, BlockKey
from protocol.layout import KvLayout
from tests.engine.elastic.shapes import PAGE, paging
from tests.thoroughness import examples

NUM_PAGES, PER_PAGE = 6, 3
NUM_BLOCKS = NUM_PAGES * PER_PAGE


class Shared(Supply):
    """Memory supply for which another worker waits."""

    asked = 0

    def asked_back(self) -> int:
        return self.asked


def make(reserve: Reserve | None = None, supply: Supply | None = None) -> tuple[BlockPool, PagedBlanks]:
    shape = paging(NUM_PAGES, blocks_per_page=PER_PAGE)
    reserve = reserve or Reserve(low=0, high=0, idle_s=1.0)
    blanks = PagedBlanks(shape, supply or Supply(NUM_PAGES), reserve=reserve)
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
    """Sequences allocate, cache and find blocks while the ceiling changes and pages are given back late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held: list[list[BlockId]] = []
        self.leaving: list[GiveBack] = []
        self.num_published = 0

    @initialize(low=st.integers(0, 2), extra=st.integers(0, 2))
    def begin(self, low: int, extra: int) -> None:
        self.supply = Shared(NUM_PAGES)
        reserve = Reserve(low=low, high=low + extra, idle_s=3.0)
        self.pool, self.blanks = make(reserve, self.supply)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        self.pool.make_way()  # workers do this on every event
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

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def others_wait(self, num_pages: int) -> None:
        """A request of another worker asks no holder of blocks to give them up."""
        self.supply.asked = 0
        before = self.pool.make_way()
        self.supply.asked = num_pages
        assert self.pool.make_way() == before

    @rule(seconds=st.floats(0.0, 5.0))
    def begin_work(self, seconds: float) -> None:
        self.now += seconds
        action = self.blanks.next_action(self.now)
        if isinstance(action, GiveBack):
            gone = range(action.page * PER_PAGE, (action.page + 1) * PER_PAGE)
            assert not any(self.pool.references_of(block) for block in gone), "it is in use"
            assert all(self.pool.key_of(block) is None for block in gone), "it can be found"
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
        self.supply.asked = 0
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


PagedPool.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
test_nothing_is_lost_whatever_comes_and_goes = PagedPool.TestCase


def test_pages_are_taken_only_for_blocks_and_given_back_when_they_are_blank() -> None:
    pool, blanks = make()
    assert (pool.num_free, blanks.num_held_pages) == (NUM_BLOCKS, 0)
    blocks = pool.allocate(PER_PAGE + 1) or []
    assert blanks.num_held_pages == 2
    pool.release(blocks)
    assert settle(blanks) == [GiveBack(page=page) for page in (1, 0)] or settle(blanks) == []
    assert (pool.num_free, blanks.num_held_pages) == (NUM_BLOCKS, 0)


def test_cached_blocks_keep_their_pages_until_somebody_needs_them() -> None:
    pool, blanks = make()
    blocks = pool.allocate(PER_PAGE) or []
    publish(pool, blocks)
    pool.release(blocks)
    settle(blanks, 100.0)
    assert blanks.num_held_pages == 1
    assert pool.match_prefix(keys(PER_PAGE)) == blocks


def test_a_few_pages_are_populated_ahead_while_blocks_come_and_go_and_none_when_they_do_not() -> None:
    pool, blanks = make(Reserve(low=2, high=3, idle_s=5.0))
    assert pool.allocate(1)
    ahead = settle(blanks, 1.0)
    assert len(ahead) == 2
    assert all(isinstance(action, Populate) for action in ahead)
    assert blanks.wake_at() == 6.0
    settle(blanks, 6.0)
    assert blanks.num_held_pages == 1
    assert blanks.wake_at() is None


def test_a_lower_ceiling_lets_pages_leave_and_a_higher_one_keeps_those_that_have_not_left() -> None:
    pool, blanks = make()
    tables = [pool.allocate(PER_PAGE) or [] for _ in range(3)]
    for seed, blocks in enumerate(tables):
        publish(pool, blocks, seed)
    pool.release(tables[2])
    blanks.limit(1)
    in_the_way = pool.make_way()
    assert len(in_the_way) == PER_PAGE, "of one of those that hold blocks"
    assert all(pool.key_of(block) is None for block in in_the_way), "nobody new may find them"
    assert pool.match_prefix(keys(PER_PAGE, 2)) == [], "what is cached goes first"
    settle(blanks)
    assert (blanks.num_held_pages, pool.num_free) == (2, 0)
    assert pool.allocate(1) is None
    assert pool.capacity == PER_PAGE
    blanks.limit(2)
    assert (pool.make_way(), pool.num_free) == (set(), 0)
    blanks.limit(3)
    assert pool.num_free == PER_PAGE


def test_for_another_worker_only_pages_leave_in_which_nothing_is_held() -> None:
    supply = Shared(NUM_PAGES)
    pool, blanks = make(supply=supply)
    held, cached = pool.allocate(PER_PAGE), pool.allocate(PER_PAGE) or []
    publish(pool, cached)
    pool.release(cached)
    supply.asked = NUM_PAGES
    assert pool.make_way() == set()
    assert settle(blanks) == [GiveBack(page=1)]
    assert held == [0, 1, 2]


layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    block_size=st.sampled_from([16, 32, 48]),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 64, 80]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(layouts, st.floats(1.0, 100.0))
def test_pieces_lie_in_their_block_s_page_and_spans_cover_the_range_once(
    layout: KvLayout, smallest_pages: float
) -> None:
    """Pieces lie where the formula of pool, kernels and transfers puts them. A span is whole kernel pages."""
    smallest = math.lcm(layout.piece_bytes, mmap.PAGESIZE) * layout.pieces_per_block
    nbytes = int(smallest * smallest_pages)
    paging = Paging.within(layout, nbytes)
    assert paging.range_bytes == layout.pool_bytes(paging.num_blocks)
    assert paging.range_bytes <= nbytes < paging.range_bytes + paging.page_bytes
    assert paging.num_pages >= min(16, int(smallest_pages))
    assert paging.span_bytes % PAGE == 0
    for block in {0, paging.blocks_per_page - 1, paging.num_blocks // 2, paging.num_blocks - 1}:
        for piece, start in enumerate(paging.spans(block // paging.blocks_per_page)):
            offset = layout.pool_offset(paging.num_blocks, piece, block)
            assert start <= offset
            assert offset + layout.piece_bytes <= start + paging.span_bytes
    spans = sorted(start for page in range(paging.num_pages) for start in paging.spans(page))
    assert spans == list(range(0, paging.range_bytes, paging.span_bytes))


def test_memory_that_holds_no_page_is_refused() -> None:
    odd = KvLayout(num_layers=4, block_size=16, num_kv_heads=1, head_dim=20, dtype="float32")
    with pytest.raises(ConfigError, match="do not hold a page"):
        Paging.within(odd, 10_000)


def test_a_pool_takes_over_what_can_be_found_and_the_memory_of_nothing_else() -> None:
    pool, blanks = make()
    cached, _left_behind = pool.allocate(2) or [], pool.allocate(PER_PAGE)
    publish(pool, cached)
    pool.release(cached)
    later = BlockPool(NUM_BLOCKS, on_added=lambda *_: None, on_removed=lambda _: None, blanks=blanks)
    later.take_over(pool)
    later.validate()
    settle(blanks, 100.0)
    settle(blanks, 200.0)
    assert blanks.num_held_pages == 1
    assert later.match_prefix(keys(2)) == cached
    assert later.num_free == NUM_BLOCKS
