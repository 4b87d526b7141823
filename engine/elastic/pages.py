"""The pages of one pool and the blocks in them. Pure.

A page is *unmapped*, *mapped*, *leaving* (no block of it is handed out any more, and it is unmapped once none is in
use) or *unmapping*; only one that is mapped or leaving may have blocks in use. Blocks come from the fullest page that
has one free, so that the others empty and can be given back. Does not know other pools.

`Paging` tells which bytes of a pool's range make up one page, and which blocks lie in it. A pool is layer-major
(`protocol.layout`): a block's pieces lie in 2·layers slabs, one after another in the range. A *page* is the same span
of blocks in every slab, given and taken together (as kvcached does it). Why not block-major inside page groups: then
a page would be one run of bytes, but what kernels, `KvPool` and every transfer see, one tensor per layer, would be
gone.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from protocol.errors import ConfigError
from protocol.ids import BlockId
from protocol.layout import KvLayout

SPAN_BYTES = 64 << 10
"""What a worker gives and takes of each layer's K and V at once: fewer bytes cost more calls, more keep more memory
where a single block is used."""
MIN_PAGES = 16
"""With fewer, one block in each would keep everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """The pages of one pool's range of `num_pages` pages. A page has one *span* in each of `num_slabs` slabs; blocks
    [page · blocks_per_page, (page + 1) · blocks_per_page) lie in it."""

    num_pages: int
    num_slabs: int
    blocks_per_page: int
    span_bytes: int

    @classmethod
    def within(cls, layout: KvLayout, nbytes: int) -> Paging:
        """Pages of a worker's pool, at most `nbytes` of them: spans of about SPAN_BYTES, smaller ones where there would
        be fewer than MIN_PAGES pages. Raises ConfigError when not even one fits."""
        smallest = math.lcm(layout.piece_bytes, mmap.PAGESIZE)
        most = nbytes // (MIN_PAGES * layout.pieces_per_block)
        span_bytes = smallest * max(1, min(-(-SPAN_BYTES // smallest), most // smallest))
        page_bytes = span_bytes * layout.pieces_per_block
        if page_bytes > nbytes:
            raise ConfigError(
                f"{nbytes} bytes of elastic KV do not hold a page of {page_bytes}, the least that the machine can take "
                "back of all layers at once"
            )
        return cls(
            num_pages=nbytes // page_bytes,
            num_slabs=layout.pieces_per_block,
            blocks_per_page=span_bytes // layout.piece_bytes,
            span_bytes=span_bytes,
        )

    @property
    def num_blocks(self) -> int:
        """Of the whole range; as many as a `KvPool` over it has."""
        return self.num_pages * self.blocks_per_page

    @property
    def page_bytes(self) -> int:
        return self.num_slabs * self.span_bytes

    @property
    def range_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def spans(self, page: int) -> list[int]:
        """Byte offsets of the page's spans, in the order of the slabs."""
        slab_bytes = self.num_pages * self.span_bytes
        first = page * self.span_bytes
        return [slab * slab_bytes + first for slab in range(self.num_slabs)]

    def pages_for(self, num_blocks: int) -> int:
        """Pages that hold this many blocks."""
        return -(-num_blocks // self.blocks_per_page)


class PageState(Enum):
    UNMAPPED = "unmapped"
    MAPPED = "mapped"
    LEAVING = "leaving"
    UNMAPPING = "unmapping"


class _ByFullness:
    """Pages that have a free block, by how many are in use."""

    def __init__(self, blocks_per_page: int) -> None:
        self._levels: list[dict[int, None]] = [{} for _ in range(blocks_per_page)]

    def add(self, page: int, used: int) -> None:
        if used < len(self._levels):  # a full page has nothing to give
            self._levels[used][page] = None

    def remove(self, page: int, used: int) -> None:
        if used < len(self._levels):
            del self._levels[used][page]

    def fullest(self) -> int | None:
        return next((next(reversed(level)) for level in reversed(self._levels) if level), None)

    @property
    def empty(self) -> Mapping[int, None]:
        """Those with no block in use, the one that emptied first at the front."""
        return self._levels[0]

    def __contains__(self, page: int) -> bool:
        return any(page in level for level in self._levels)


class Pages:
    """States and blocks of one pool's pages."""

    def __init__(self, paging: Paging) -> None:
        self.paging = paging
        self._states = [PageState.UNMAPPED] * paging.num_pages
        self._unmapped = list(range(paging.num_pages - 1, -1, -1))  # a stack: low pages first
        self._blocks: dict[int, list[BlockId]] = {}  # free ones of pages that are held
        self._ready = _ByFullness(paging.blocks_per_page)  # mapped
        self._leaving: dict[int, None] = {}
        self._is_used = bytearray(paging.num_blocks)
        self.num_used = 0
        self.num_leaving = 0

    # -- what is there

    @property
    def num_held(self) -> int:
        """Mapped and leaving pages."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """In held pages that are not leaving."""
        free = self.num_held * self.paging.blocks_per_page - self.num_used
        return free - sum(len(self._blocks[page]) for page in self._leaving)

    @property
    def leaving(self) -> Collection[int]:
        """Pages of which no block is handed out any more."""
        return self._leaving.keys()

    @property
    def num_unmapped(self) -> int:
        return len(self._unmapped)

    def state(self, page: int) -> PageState:
        return self._states[page]

    def used_in(self, page: int) -> int:
        """Blocks in use."""
        free = self._blocks.get(page)
        return 0 if free is None else self.paging.blocks_per_page - len(free)

    @property
    def num_empty(self) -> int:
        """Mapped pages with no block in use."""
        return len(self._ready.empty)

    def first_empty(self) -> int:
        """The longest empty one of them."""
        return next(iter(self._ready.empty))

    # -- blocks

    def take(self, count: int) -> list[BlockId]:
        """`count` free blocks, of which there must be enough."""
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks of {self.num_free_blocks} free ones")
        blocks: list[BlockId] = []
        while len(blocks) < count:
            page = self._ready.fullest()
            assert page is not None, "what is free is in some page"
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

    def give_one(self, block: BlockId) -> int:
        """A block that is in use comes back; how many of its page still are."""
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

    # -- the life of a page

    def open(self) -> int:
        """Takes an unmapped page into use; its blocks can be taken from now on."""
        page = self._unmapped.pop()
        first = page * self.paging.blocks_per_page
        self._states[page] = PageState.MAPPED
        self._blocks[page] = [BlockId(block) for block in range(first + self.paging.blocks_per_page - 1, first - 1, -1)]
        self._ready.add(page, 0)
        return page

    def leave(self, page: int) -> None:
        """Its blocks come back and are not handed out again, until it is unmapped or stays after all."""
        self._require(page, PageState.MAPPED)
        self._ready.remove(page, self.used_in(page))
        self._states[page] = PageState.LEAVING
        self._leaving[page] = None

    def stay(self, page: int) -> None:
        self._require(page, PageState.LEAVING)
        del self._leaving[page]
        self._states[page] = PageState.MAPPED
        self._ready.add(page, self.used_in(page))

    def begin_unmapping(self, page: int) -> None:
        if self.used_in(page):
            raise ValueError(f"page {page} is in use")
        if self._states[page] is PageState.LEAVING:
            self.stay(page)
        self._require(page, PageState.MAPPED)
        self._ready.remove(page, 0)
        del self._blocks[page]
        self._states[page] = PageState.UNMAPPING
        self.num_leaving += 1

    def unmapped(self, page: int) -> None:
        """The machine has its memory back."""
        self._require(page, PageState.UNMAPPING)
        self.num_leaving -= 1
        self._states[page] = PageState.UNMAPPED
        self._unmapped.append(page)

    def _require(self, page: int, state: PageState) -> None:
        if self._states[page] is not state:
            raise ValueError(f"page {page} is {self._states[page].value}, not {state.value}")

    # -- proof

    def in_state(self, state: PageState) -> list[int]:
        return [page for page, each in enumerate(self._states) if each is state]

    def used(self) -> list[BlockId]:
        """Blocks in use."""
        return [block for block, used in enumerate(self._is_used) if used]

    def validate(self) -> None:
        """Raises AssertionError unless every page and block is accounted for exactly once."""
        per_page = self.paging.blocks_per_page
        count = self._states.count
        assert len(self._leaving) == count(PageState.LEAVING), "leaving pages drifted"
        assert len(set(self._unmapped)) == len(self._unmapped) == count(PageState.UNMAPPED)
        assert self.num_leaving == count(PageState.UNMAPPING), "pages on their way out drifted"
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
