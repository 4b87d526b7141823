"""Page states and free blocks of one elastic pool. Pure.

A page is *unmapped*, *mapped*, *draining* (its blocks are no longer handed out, and it is unmapped once none is in use)
or *unmapping*. Only mapped and draining pages may have blocks in use. Blocks come from the fullest page that has a free
one, so that other pages become empty and can be given back. Does not know other pools.

`Paging` defines the bytes and blocks of a page. A pool is layer-major (`protocol.kv_blocks`): a block's pieces lie in
2·layers slabs, one after another in the range. A *page* is the same span of blocks in every slab, taken and given back
together, as in kvcached. A block-major layout inside page groups would make a page one run of bytes, but kernels,
`KvTensors` and transfers need one tensor per layer.
"""

import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.request import BlockId

SPAN_BYTES = 64 << 10
"""Approximate bytes of a page in each layer's K and V: smaller pages cost more calls, larger ones hold more memory for
a single used block."""
MIN_PAGES = 16
"""Least number of pages of a pool: with fewer, few used blocks would hold all memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Division of a pool's range into `num_pages` pages. A page has one *span* in each of `num_slabs` slabs and holds
    blocks [page · blocks_per_page, (page + 1) · blocks_per_page)."""

    num_pages: int
    num_slabs: int
    blocks_per_page: int
    span_bytes: int

    @classmethod
    def within(cls, layout: KvLayout, nbytes: int) -> "Paging":
        """Divides at most `nbytes` into pages with spans of about SPAN_BYTES, or smaller spans if there would be fewer
        than MIN_PAGES pages. Raises ConfigError if not even one page fits."""
        smallest = math.lcm(layout.piece_bytes, mmap.PAGESIZE)
        most = nbytes // (MIN_PAGES * layout.pieces_per_block)
        span_bytes = smallest * max(1, min(-(-SPAN_BYTES // smallest), most // smallest))
        page_bytes = span_bytes * layout.pieces_per_block
        if page_bytes > nbytes:
            raise ConfigError(
                f"{nbytes} bytes of elastic KV are less than one page of {page_bytes} bytes; raise --kv-cache-memory"
            )
        return cls(
            num_pages=nbytes // page_bytes,
            num_slabs=layout.pieces_per_block,
            blocks_per_page=span_bytes // layout.piece_bytes,
            span_bytes=span_bytes,
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the whole range, equal to that of a `KvTensors` over it."""
        return self.num_pages * self.blocks_per_page

    @property
    def page_bytes(self) -> int:
        return self.num_slabs * self.span_bytes

    @property
    def range_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def spans(self, page: int) -> list[int]:
        """Returns the byte offsets of the page's spans, in the order of the slabs."""
        slab_bytes = self.num_pages * self.span_bytes
        first = page * self.span_bytes
        return [slab * slab_bytes + first for slab in range(self.num_slabs)]

    def pages_for(self, num_blocks: int) -> int:
        """Returns the number of pages that hold this many blocks."""
        return -(-num_blocks // self.blocks_per_page)


class PageState(Enum):
    UNMAPPED = "unmapped"
    MAPPED = "mapped"
    DRAINING = "draining"
    UNMAPPING = "unmapping"


class _ByFullness:
    """Index of the pages with a free block, by their number of blocks in use."""

    def __init__(self, blocks_per_page: int) -> None:
        self._levels: list[dict[int, None]] = [{} for _ in range(blocks_per_page)]

    def add(self, page: int, used: int) -> None:
        if used < len(self._levels):  # a full page has no free block
            self._levels[used][page] = None

    def remove(self, page: int, used: int) -> None:
        if used < len(self._levels):
            del self._levels[used][page]

    def fullest(self) -> int | None:
        return next((next(reversed(level)) for level in reversed(self._levels) if level), None)

    @property
    def empty(self) -> Mapping[int, None]:
        """Pages with no block in use, in the order in which they became empty."""
        return self._levels[0]

    def __contains__(self, page: int) -> bool:
        return any(page in level for level in self._levels)


class Pages:
    """States and free blocks of one pool's pages."""

    def __init__(self, paging: Paging) -> None:
        self.paging = paging
        self._states = [PageState.UNMAPPED] * paging.num_pages
        self._unmapped = list(range(paging.num_pages - 1, -1, -1))  # a stack: low pages first
        self._blocks: dict[int, list[BlockId]] = {}  # free blocks of held pages
        self._ready = _ByFullness(paging.blocks_per_page)  # mapped pages only
        self._draining: dict[int, None] = {}
        self._is_used = bytearray(paging.num_blocks)
        self.num_used = 0
        self.num_unmapping = 0  # pages in state UNMAPPING; see `draining` for DRAINING

    # -- state

    @property
    def num_held(self) -> int:
        """Number of mapped and draining pages."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks in mapped pages, without draining ones."""
        free = self.num_held * self.paging.blocks_per_page - self.num_used
        return free - sum(len(self._blocks[page]) for page in self._draining)

    @property
    def draining(self) -> Collection[int]:
        """Pages in state DRAINING, whose blocks are no longer handed out."""
        return self._draining.keys()

    @property
    def num_unmapped(self) -> int:
        return len(self._unmapped)

    def state(self, page: int) -> PageState:
        return self._states[page]

    def used_in(self, page: int) -> int:
        """Returns the number of blocks in use in a page."""
        free = self._blocks.get(page)
        return 0 if free is None else self.paging.blocks_per_page - len(free)

    @property
    def num_empty(self) -> int:
        """Number of mapped pages with no block in use."""
        return len(self._ready.empty)

    def first_empty(self) -> int:
        """Returns the mapped page that has been empty longest."""
        return next(iter(self._ready.empty))

    # -- blocks

    def take(self, count: int) -> list[BlockId]:
        """Takes `count` free blocks. Raises ValueError if there are fewer."""
        if count > self.num_free_blocks:
            raise ValueError(f"cannot take {count} blocks: {self.num_free_blocks} are free")
        blocks: list[BlockId] = []
        while len(blocks) < count:
            page = self._ready.fullest()
            assert page is not None, "a free block is in some page"
            blocks += self._take_from(page, count - len(blocks))
        return blocks

    def _take_from(self, page: int, count: int) -> list[BlockId]:
        used, free = self.used_in(page), self._blocks[page]
        self._ready.remove(page, used)
        taken = [free.pop() for _ in range(min(count, len(free)))]
        self._ready.add(page, used + len(taken))
        for block in taken:
            self._is_used[block] = 1
        self.num_used += len(taken)
        return taken

    def put(self, block: BlockId) -> int:
        """Returns a used block to its page, and returns how many blocks of the page are still in use."""
        if not self._is_used[block]:
            raise ValueError(f"block {block} is not in use and cannot be given back")
        page = block // self.paging.blocks_per_page
        free = self._blocks[page]
        used = self.paging.blocks_per_page - len(free)
        free.append(block)
        if self._states[page] is PageState.MAPPED:
            self._ready.remove(page, used)
            self._ready.add(page, used - 1)
        self._is_used[block] = 0
        self.num_used -= 1
        return used - 1

    # -- page states

    def map_page(self) -> int:
        """Maps an unmapped page and returns its number. Its blocks can be taken from now on."""
        page = self._unmapped.pop()
        first = page * self.paging.blocks_per_page
        self._states[page] = PageState.MAPPED
        self._blocks[page] = [BlockId(block) for block in range(first + self.paging.blocks_per_page - 1, first - 1, -1)]
        self._ready.add(page, 0)
        return page

    def drain(self, page: int) -> None:
        """Marks a mapped page as draining: its blocks are not handed out unless the drain is cancelled."""
        self._require(page, PageState.MAPPED)
        self._ready.remove(page, self.used_in(page))
        self._states[page] = PageState.DRAINING
        self._draining[page] = None

    def cancel_drain(self, page: int) -> None:
        self._require(page, PageState.DRAINING)
        del self._draining[page]
        self._states[page] = PageState.MAPPED
        self._ready.add(page, self.used_in(page))

    def begin_unmapping(self, page: int) -> None:
        if self.used_in(page):
            raise ValueError(f"page {page} is in use")
        if self._states[page] is PageState.DRAINING:
            self.cancel_drain(page)
        self._require(page, PageState.MAPPED)
        self._ready.remove(page, 0)
        del self._blocks[page]
        self._states[page] = PageState.UNMAPPING
        self.num_unmapping += 1

    def unmapped(self, page: int) -> None:
        """Marks an unmapping page as unmapped, once the machine has its memory back."""
        self._require(page, PageState.UNMAPPING)
        self.num_unmapping -= 1
        self._states[page] = PageState.UNMAPPED
        self._unmapped.append(page)

    def _require(self, page: int, state: PageState) -> None:
        if self._states[page] is not state:
            raise ValueError(f"page {page} is {self._states[page].value}, not {state.value}")

    # -- validation

    def in_state(self, state: PageState) -> list[int]:
        return [page for page, each in enumerate(self._states) if each is state]

    def used(self) -> list[BlockId]:
        """Returns the blocks in use."""
        return [block for block, used in enumerate(self._is_used) if used]

    def validate(self) -> None:
        """Raises AssertionError unless every page and block is accounted for exactly once."""
        per_page = self.paging.blocks_per_page
        count = self._states.count
        assert len(self._draining) == count(PageState.DRAINING), "draining pages drifted"
        assert len(set(self._unmapped)) == len(self._unmapped) == count(PageState.UNMAPPED)
        assert self.num_unmapping == count(PageState.UNMAPPING), "pages on their way out drifted"
        assert self.num_used == sum(self._is_used), "blocks in use drifted"
        for page, state in enumerate(self._states):
            own = range(page * per_page, (page + 1) * per_page)
            is_held = state not in (PageState.UNMAPPED, PageState.UNMAPPING)
            assert is_held == (page in self._blocks), f"page {page} is {state} and its blocks are not"
            free = set(self._blocks.get(page, ()))
            used = {block for block in own if self._is_used[block]}
            assert not free & used, f"a block of page {page} is free and in use"
            assert free | used == (set(own) if is_held else set()), f"a block of page {page} is lost"
            assert len(free) == len(self._blocks.get(page, ())), f"a block of page {page} is free twice"
            assert (page in self._ready) == (state is PageState.MAPPED and bool(free))
