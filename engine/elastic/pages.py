"""The pages of one model and the blocks in them. Pure.

A page is *unmapped*, *promised* (waits for frames that others give back), *mapping*, *mapped*, *leaving* (no block of
it is handed out any more, and it is unmapped once none is in use) or *unmapping*; only one that is promised, mapping,
mapped or leaving may have blocks in use. Blocks come from the fullest page that has one free, so that the others empty
and can be given back. Pages that are mapped are preferred, since blocks in one that is not yet must be waited for.
Knows neither budgets nor other models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum

from engine.elastic.paging import Paging
from protocol.ids import BlockId

Frame = int
"""One unit of physical memory: an index below the budget's number of frames."""


class PageState(Enum):
    UNMAPPED = "unmapped"
    PROMISED = "promised"
    MAPPING = "mapping"
    MAPPED = "mapped"
    LEAVING = "leaving"
    UNMAPPING = "unmapping"


class _ByFullness:
    """Pages that have a free block, by how many are in use. O(1) each."""

    def __init__(self, blocks_per_page: int) -> None:
        self._levels: list[dict[int, None]] = [{} for _ in range(blocks_per_page)]
        self._occupied = 0  # bit n: some page has n blocks in use

    def add(self, page: int, used: int) -> None:
        if used < len(self._levels):  # a full page has nothing to give
            self._levels[used][page] = None
            self._occupied |= 1 << used

    def remove(self, page: int, used: int) -> None:
        if used < len(self._levels):
            del self._levels[used][page]
            if not self._levels[used]:
                self._occupied &= ~(1 << used)

    def fullest(self) -> int | None:
        if not self._occupied:
            return None
        return next(reversed(self._levels[self._occupied.bit_length() - 1]))

    @property
    def empty(self) -> Mapping[int, None]:
        """Those with no block in use, the one that emptied first at the front."""
        return self._levels[0]

    def __contains__(self, page: int) -> bool:
        return any(page in level for level in self._levels)


class Pages:
    """States, frames, pins and blocks of one model's pages."""

    def __init__(self, paging: Paging) -> None:
        self.paging = paging
        per_page = paging.blocks_per_page
        self._states = [PageState.UNMAPPED] * paging.num_pages
        self._unmapped = list(range(paging.num_pages - 1, -1, -1))  # a stack: low pages first
        self._frames: dict[int, tuple[Frame, ...]] = {}  # of pages mapping, mapped or unmapping
        self._blocks: dict[int, list[BlockId]] = {}  # free ones of pages that are held
        self._ready = _ByFullness(per_page)  # mapped
        self._coming = _ByFullness(per_page)  # promised or mapping
        self._gone_soon = _ByFullness(per_page)  # leaving
        self._leaving: dict[int, None] = {}
        self._is_used = bytearray(paging.num_blocks)
        self._pins: dict[int, int] = {}
        self.num_used = 0
        self.num_leaving = 0

    # -- what is there

    @property
    def num_held(self) -> int:
        """Promised, mapping, mapped and leaving pages."""
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

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def state(self, page: int) -> PageState:
        return self._states[page]

    def frames(self, page: int) -> tuple[Frame, ...]:
        return self._frames[page]

    def used_in(self, page: int) -> int:
        """Blocks in use."""
        free = self._blocks.get(page)
        return 0 if free is None else self.paging.blocks_per_page - len(free)

    @property
    def num_empty(self) -> int:
        """Mapped pages that nobody would miss: no block in use and not pinned."""
        empty = self._ready.empty
        return len(empty) - sum(page in empty for page in self._pins)

    def first_empty(self) -> int:
        """The longest empty one of them."""
        return next(page for page in self._ready.empty if page not in self._pins)

    @property
    def num_empty_coming(self) -> int:
        """Pages on their way in that no block is taken from yet."""
        return len(self._coming.empty)

    def emptiest(self) -> list[int]:
        """Pages with blocks in use, the emptiest first: the order in which freeing blocks frees pages soonest."""
        used = (page for page in self._blocks if self.used_in(page))
        return sorted(used, key=self.used_in)

    # -- blocks

    def take(self, count: int) -> list[BlockId]:
        """`count` free blocks, of which there must be enough."""
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks of {self.num_free_blocks} free ones")
        blocks: list[BlockId] = []
        for pages in (self._ready, self._coming):
            while len(blocks) < count:
                page = pages.fullest()
                if page is None:
                    break
                blocks += self._take_from(page, count - len(blocks))
        return blocks

    def _take_from(self, page: int, count: int) -> list[BlockId]:
        pages, used, free = self._list_of(page), self.used_in(page), self._blocks[page]
        pages.remove(page, used)
        taken = [free.pop() for _ in range(min(count, len(free)))]
        pages.add(page, used + len(taken))
        for block in taken:
            self._is_used[block] = 1
        self.num_used += len(taken)
        return taken

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """Raises ValueError, and changes nothing, for a block that is not in use or is named twice."""
        given = list(blocks)
        if len(set(given)) != len(given):
            raise ValueError("a block is given back twice")
        for block in given:
            if not 0 <= block < self.paging.num_blocks or not self._is_used[block]:
                raise ValueError(f"block {block} is not in use and cannot be given back")
        for block in given:
            self.give_one(block)

    def give_one(self, block: BlockId) -> int:
        """A block that is in use comes back; how many of its page still are."""
        if not self._is_used[block]:
            raise ValueError(f"block {block} is not in use and cannot be given back")
        page = block // self.paging.blocks_per_page
        free, pages = self._blocks[page], self._list_of(page)
        used = self.paging.blocks_per_page - len(free)
        pages.remove(page, used)
        free.append(block)
        pages.add(page, used - 1)
        self._is_used[block] = 0
        self.num_used -= 1
        return used - 1

    def pages_of(self, blocks: Iterable[BlockId]) -> set[int]:
        return {block // self.paging.blocks_per_page for block in blocks}

    # -- the life of a page

    def promise(self, page: int | None = None) -> int:
        """Takes an unmapped page (this one) into use; its blocks can be taken from now on."""
        if page is None:
            page = self._unmapped.pop()
        else:
            self._require(page, PageState.UNMAPPED)
            self._unmapped.remove(page)
        first = page * self.paging.blocks_per_page
        self._states[page] = PageState.PROMISED
        self._blocks[page] = [
            BlockId(block)
            for block in range(first + self.paging.blocks_per_page - 1, first - 1, -1)
        ]
        self._coming.add(page, 0)
        return page

    def begin_mapping(self, page: int, frames: tuple[Frame, ...]) -> None:
        self._require(page, PageState.PROMISED)
        self._states[page] = PageState.MAPPING
        self._frames[page] = frames

    def mapped(self, page: int) -> None:
        self._require(page, PageState.MAPPING)
        self._coming.remove(page, self.used_in(page))
        self._states[page] = PageState.MAPPED
        self._ready.add(page, self.used_in(page))

    def not_mapped(self, page: int) -> tuple[Frame, ...]:
        """The page could not be mapped; its blocks have been given back. Its frames are nobody's again."""
        self._require(page, PageState.MAPPING)
        if self.used_in(page):
            raise ValueError(f"page {page} has blocks in use")
        self._coming.remove(page, 0)
        del self._blocks[page]
        return self._gone(page)

    def leave(self, page: int) -> None:
        """Its blocks come back and are not handed out again, until it is unmapped or stays after all."""
        self._require(page, PageState.MAPPED)
        self._ready.remove(page, self.used_in(page))
        self._states[page] = PageState.LEAVING
        self._leaving[page] = None
        self._gone_soon.add(page, self.used_in(page))

    def stay(self, page: int) -> None:
        self._require(page, PageState.LEAVING)
        self._gone_soon.remove(page, self.used_in(page))
        del self._leaving[page]
        self._states[page] = PageState.MAPPED
        self._ready.add(page, self.used_in(page))

    def begin_unmapping(self, page: int) -> None:
        if self.used_in(page) or page in self._pins:
            raise ValueError(f"page {page} is in use or pinned")
        if self._states[page] is PageState.LEAVING:
            self.stay(page)
        self._require(page, PageState.MAPPED)
        self._ready.remove(page, 0)
        del self._blocks[page]
        self._states[page] = PageState.UNMAPPING
        self.num_leaving += 1

    def unmapped(self, page: int) -> tuple[Frame, ...]:
        """Its frames are nobody's again."""
        self._require(page, PageState.UNMAPPING)
        self.num_leaving -= 1
        return self._gone(page)

    def _gone(self, page: int) -> tuple[Frame, ...]:
        self._states[page] = PageState.UNMAPPED
        self._unmapped.append(page)
        return self._frames.pop(page)

    # -- pins

    def pin(self, page: int) -> None:
        """A held page is not unmapped before as many `unpin`."""
        if page not in self._blocks:
            raise ValueError(f"page {page} is {self._states[page].value} and cannot be pinned")
        self._pins[page] = self._pins.get(page, 0) + 1

    def unpin(self, page: int) -> None:
        if self._pins[page] == 1:
            del self._pins[page]
        else:
            self._pins[page] -= 1

    def _list_of(self, page: int) -> _ByFullness:
        match self._states[page]:
            case PageState.MAPPED:
                return self._ready
            case PageState.LEAVING:
                return self._gone_soon
        return self._coming

    def _require(self, page: int, state: PageState) -> None:
        if self._states[page] is not state:
            raise ValueError(f"page {page} is {self._states[page].value}, not {state.value}")

    # -- proof

    def promised(self) -> list[int]:
        return self.in_state(PageState.PROMISED)

    def in_state(self, state: PageState) -> list[int]:
        return [page for page, each in enumerate(self._states) if each is state]

    def used(self) -> list[BlockId]:
        """Blocks in use."""
        return [block for block, used in enumerate(self._is_used) if used]

    def all_frames(self) -> Iterator[Frame]:
        for frames in self._frames.values():
            yield from frames

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
            assert is_held == (page in self._blocks), (
                f"page {page} is {state} and its blocks are not"
            )
            has_frames = state not in (PageState.UNMAPPED, PageState.PROMISED)
            assert has_frames == (page in self._frames), f"frames of page {page}"
            free = set(self._blocks.get(page, ()))
            used = {block for block in own if self._is_used[block]}
            assert not free & used, f"a block of page {page} is free and in use"
            assert free | used == (set(own) if is_held else set()), (
                f"a block of page {page} is lost"
            )
            assert len(free) == len(self._blocks.get(page, ())), (
                f"a block of page {page} is free twice"
            )
            assert (page in self._ready) == (state is PageState.MAPPED and bool(free))
            assert (page in self._gone_soon) == (state is PageState.LEAVING and bool(free))
            assert page not in self._pins or is_held, f"pinned page {page} is {state}"
            if has_frames:
                assert len(self._frames[page]) == self.paging.frames_per_page
