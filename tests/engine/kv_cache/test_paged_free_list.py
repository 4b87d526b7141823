"""Pool over elastic memory: random use, limits, requests of other workers, late give-backs, and the layout of pages."""

import math
import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.kv_cache.elastic_pages import PageState, Paging
from moonserve.engine.kv_cache.paged_free_list import DiscardPage, PagedFreeList, PageSupply, PopulatePage, Reserve
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, KvLayout
from moonserve.protocol.request import BlockId
from tests.engine.kv_cache.shapes import PAGE, paging, quiet_pool
from tests.thoroughness import any_order

NUM_PAGES, PER_PAGE = 6, 3
NUM_BLOCKS = NUM_PAGES * PER_PAGE


class Shared(PageSupply):
    """Memory supply for which another worker waits."""

    asked = 0

    def pages_requested(self) -> int:
        return self.asked


def make(reserve: Reserve | None = None, supply: PageSupply | None = None) -> tuple[BlockPool, PagedFreeList]:
    shape = paging(NUM_PAGES, blocks_per_page=PER_PAGE)
    reserve = reserve or Reserve(low=0, high=0, idle_s=1.0)
    free_list = PagedFreeList(shape, supply or PageSupply(NUM_PAGES), reserve=reserve)
    pool = quiet_pool(NUM_BLOCKS, free_list=free_list)
    return pool, free_list


def settle(free_list: PagedFreeList, now: float = 0.0) -> list[PopulatePage | DiscardPage]:
    done: list[PopulatePage | DiscardPage] = []
    while (action := free_list.next_action(now)) is not None:
        done.append(action)
        if isinstance(action, DiscardPage):
            free_list.on_discarded(action)
        free_list.validate()
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
        self.leaving: list[DiscardPage] = []
        self.num_published = 0

    @initialize(low=st.integers(0, 2), extra=st.integers(0, 2))
    def begin(self, low: int, extra: int) -> None:
        self.supply = Shared(NUM_PAGES)
        reserve = Reserve(low=low, high=low + extra, idle_s=3.0)
        self.pool, self.free_list = make(reserve, self.supply)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        self.pool.reclaim()  # workers do this on every event
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks:
            assert len(set(blocks)) == count
            pages = {block // PER_PAGE for block in blocks}
            states = {self.free_list._pages.state(page) for page in pages}
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
        self.free_list.limit(num_pages)
        in_the_way = self.pool.reclaim()
        held = {block for blocks in self.held for block in blocks}
        assert in_the_way <= held
        staying = self.free_list.num_held_pages - self.free_list._pages.num_unmapping
        assert staying - len(self.free_list._pages.draining) <= num_pages
        for block in in_the_way:
            assert self.pool.key_of(block) is None, "nobody new may find it"

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def others_wait(self, num_pages: int) -> None:
        """A request of another worker asks no holder of blocks to give them up."""
        self.supply.asked = 0
        before = self.pool.reclaim()
        self.supply.asked = num_pages
        assert self.pool.reclaim() == before

    @rule(seconds=st.floats(0.0, 5.0))
    def begin_work(self, seconds: float) -> None:
        self.now += seconds
        action = self.free_list.next_action(self.now)
        if isinstance(action, DiscardPage):
            gone = range(action.page * PER_PAGE, (action.page + 1) * PER_PAGE)
            assert not any(self.pool.references_of(block) for block in gone), "it is in use"
            assert all(self.pool.key_of(block) is None for block in gone), "it can be found"
            self.leaving.append(action)

    @precondition(lambda self: self.leaving)
    @rule()
    def end_work(self) -> None:
        self.free_list.on_discarded(self.leaving.pop())

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.validate()
        self.free_list.validate()
        assert self.pool.num_free + self.pool.num_held <= NUM_BLOCKS

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.supply.asked = 0
        for blocks in self.held:
            self.pool.release(blocks)
        for action in self.leaving:
            self.free_list.on_discarded(action)
        self.pool.reclaim()
        settle(self.free_list, self.now)
        assert self.free_list.num_held_pages <= self.free_list.ceiling
        self.free_list.limit(NUM_PAGES)
        everything = self.pool.allocate(NUM_BLOCKS)
        assert everything is not None
        self.pool.release(everything)
        settle(self.free_list, self.now)
        settle(self.free_list, self.now + 10.0)
        assert self.free_list.num_held_pages == 0


test_nothing_is_lost_whatever_comes_and_goes = any_order(PagedPool, 25, 30)


def test_pages_are_held_only_while_they_hold_blocks() -> None:
    pool, free_list = make()
    assert (pool.num_free, free_list.num_held_pages) == (NUM_BLOCKS, 0)
    blocks = pool.allocate(PER_PAGE + 1) or []
    assert free_list.num_held_pages == 2
    pool.release(blocks)
    assert settle(free_list) == [DiscardPage(page=page) for page in (1, 0)] or settle(free_list) == []
    assert (pool.num_free, free_list.num_held_pages) == (NUM_BLOCKS, 0)


def test_cached_blocks_keep_their_pages_until_blocks_are_needed() -> None:
    pool, free_list = make()
    blocks = pool.allocate(PER_PAGE) or []
    publish(pool, blocks)
    pool.release(blocks)
    settle(free_list, 100.0)
    assert free_list.num_held_pages == 1
    assert pool.match_prefix(keys(PER_PAGE)) == blocks


def test_active_pool_populates_pages_ahead_and_idle_pool_does_not() -> None:
    pool, free_list = make(Reserve(low=2, high=3, idle_s=5.0))
    assert pool.allocate(1)
    ahead = settle(free_list, 1.0)
    assert len(ahead) == 2
    assert all(isinstance(action, PopulatePage) for action in ahead)
    assert free_list.wake_at() == 6.0
    settle(free_list, 6.0)
    assert free_list.num_held_pages == 1
    assert free_list.wake_at() is None


def test_lower_ceiling_drains_pages_and_higher_ceiling_cancels_drains() -> None:
    pool, free_list = make()
    tables = [pool.allocate(PER_PAGE) or [] for _ in range(3)]
    for seed, blocks in enumerate(tables):
        publish(pool, blocks, seed)
    pool.release(tables[2])
    free_list.limit(1)
    in_the_way = pool.reclaim()
    assert len(in_the_way) == PER_PAGE, "of one of those that hold blocks"
    assert all(pool.key_of(block) is None for block in in_the_way), "nobody new may find them"
    assert pool.match_prefix(keys(PER_PAGE, 2)) == [], "what is cached goes first"
    settle(free_list)
    assert (free_list.num_held_pages, pool.num_free) == (2, 0)
    assert pool.allocate(1) is None
    assert pool.capacity == PER_PAGE
    free_list.limit(2)
    assert (pool.reclaim(), pool.num_free) == (set(), 0)
    free_list.limit(3)
    assert pool.num_free == PER_PAGE


def test_only_pages_without_held_blocks_are_drained_for_another_worker() -> None:
    supply = Shared(NUM_PAGES)
    pool, free_list = make(supply=supply)
    held, cached = pool.allocate(PER_PAGE), pool.allocate(PER_PAGE) or []
    publish(pool, cached)
    pool.release(cached)
    supply.asked = NUM_PAGES
    assert pool.reclaim() == set()
    assert settle(free_list) == [DiscardPage(page=1)]
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
def test_pieces_lie_in_the_page_of_their_block_and_spans_cover_the_range(
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


def test_memory_smaller_than_a_page_is_refused() -> None:
    odd = KvLayout(num_layers=4, block_size=16, num_kv_heads=1, head_dim=20, dtype="float32")
    with pytest.raises(ConfigError, match="less than one page"):
        Paging.within(odd, 10_000)


def test_new_pool_adopts_findable_blocks_and_only_their_memory() -> None:
    pool, free_list = make()
    cached, _left_behind = pool.allocate(2) or [], pool.allocate(PER_PAGE)
    publish(pool, cached)
    pool.release(cached)
    later = quiet_pool(NUM_BLOCKS, free_list=free_list)
    later.adopt_cache(pool)
    later.validate()
    settle(free_list, 100.0)
    settle(free_list, 200.0)
    assert free_list.num_held_pages == 1
    assert later.match_prefix(keys(2)) == cached
    assert later.num_free == NUM_BLOCKS
