"""Free list of a pool with elastic memory: chooses blocks to hand out and pages to give back. Pure.

Blocks are taken from the fullest page that has a free one, so that other pages become empty. An empty page is given
back to the machine: immediately if there are more than a small reserve, the reserve once the pool is idle, and any of
them if another worker waits. If the ceiling is lowered below the pages with blocks in use, the pages with the fewest
held blocks are *drained*: their blocks are no longer handed out, and holders of the rest release them
(`BlockPool.reclaim`). For another worker's need, only pages without held blocks are drained.

A page counts as taken from the moment when its blocks may be handed out until the machine has it back. Writing to a
page that is not populated makes it resident too, so no caller has to wait here.

A `PageSupply` provides the memory of pages: without limit, or as a share of the budget of several workers.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moonserve.engine.kv_cache.block_pool import FreeList
from moonserve.engine.kv_cache.elastic_pages import Pages, PageState, Paging
from moonserve.protocol.request import BlockId


class PageSupply:
    """Counter of the pages that a worker without a shared budget may take; `SharedPageSupply` is for a shared one."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = self._left = num_pages

    def take(self, count: int) -> int:
        """Takes up to `count` pages and returns how many are available now."""
        taken = min(count, self._left)
        self._left -= taken
        return taken

    def give(self, count: int) -> None:
        """Returns `count` pages, which the machine has back."""
        self._left += count

    def num_available(self) -> int:
        """Returns the number of pages that `take` could give, as far as is known."""
        return self._left

    def max_pages(self) -> int:
        """Returns the number of pages that could be held at most under the current floors."""
        return self._num_pages

    def report_wanted(self, count: int) -> None:
        """Reports that the worker waits for `count` pages, until the next call."""

    def report_spare(self, count: int) -> None:
        """Reports that `count` held pages could be given back with the loss of cached blocks only."""

    def pages_requested(self) -> int:
        """Returns how many spare pages this worker should give back because others wait for them."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Number of empty pages that an active pool keeps: below `low` pages are opened, above `high` given back. The
    numbers are kvcached's."""

    low: int = 5
    high: int = 10
    idle_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulatePage:
    """Request to make the page's memory resident before it is written."""

    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardPage:
    """Request to give the page's memory back to the machine. Its blocks are blank and cannot be taken. Completion is
    reported with `on_discarded`."""

    page: int


class PagedFreeList(FreeList):
    """Free list of one pool over pages. Not thread-safe."""

    def __init__(
        self,
        paging: Paging,
        supply: PageSupply,
        *,
        reserve: Reserve | None = None,
        on_work: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_work` is called when `next_action` may have something to do."""
        self.paging = paging
        self.ceiling = paging.num_pages  # in pages
        self.on_work = on_work
        self._supply = supply
        self._reserve = reserve or Reserve()
        self._pages = Pages(paging)
        self._unpopulated: list[int] = []  # opened ahead, not populated yet
        self._is_used = False  # since the last `next_action`
        self._used_at = 0.0
        self._is_idle = True
        self._is_full = False  # the last attempt to open a page ahead failed
        self._num_wanted = 0  # pages: largest request since `clear_wanted`
        self._num_reported = 0  # `_num_wanted` as last reported to the supply

    # -- state

    @property
    def num_held_pages(self) -> int:
        """Number of pages whose memory the pool uses or is about to use, including pages being given back."""
        return self._pages.num_held + self._pages.num_unmapping

    @property
    def num_wanted_pages(self) -> int:
        """Number of pages that requests wait for."""
        return self._num_wanted

    @property
    def num_ready(self) -> int:
        return self._pages.num_free_blocks

    @property
    def num_in_reach(self) -> int:
        return self.num_ready + self._num_pages_in_reach() * self.paging.blocks_per_page

    @property
    def capacity(self) -> int:
        return min(self.ceiling, self._supply.max_pages()) * self.paging.blocks_per_page

    def _num_pages_in_reach(self) -> int:
        below = min(self.ceiling - self.num_held_pages, self._pages.num_unmapped)
        return min(below, self._supply.num_available()) if below > 0 else 0

    # -- blocks

    def prepare(self, count: int) -> None:
        self._open(self.paging.pages_for(count - self.num_ready))
        if self._num_wanted and count <= self.num_ready:
            self.on_work()  # the request may no longer wait

    def want(self, count: int) -> None:
        self._num_wanted = max(self._num_wanted, self.paging.pages_for(count))
        if self._num_wanted > self._num_reported:
            self.report_wanted_pages()
            self.on_work()

    def clear_wanted(self) -> None:
        """Clears the wanted pages. Requests that still wait repeat it."""
        self._num_wanted = 0

    def report_wanted_pages(self) -> None:
        """Reports the wanted pages to the supply; repeating it keeps it alive."""
        self._num_reported = self._num_wanted
        below = max(0, self.ceiling - self.num_held_pages)
        self._supply.report_wanted(min(self._num_wanted, below))

    def _open(self, count: int) -> list[int]:
        below = min(count, self.ceiling - self.num_held_pages, self._pages.num_unmapped)
        return [self._pages.map_page() for _ in range(self._supply.take(below) if below > 0 else 0)]

    def take(self, count: int) -> list[BlockId] | None:
        if count > self.num_ready:
            return None
        self._is_used = True
        blocks = self._pages.take(count)
        if self._pages.num_empty < self._reserve.low and not self._is_full:
            self.on_work()
        return blocks

    def put(self, block: BlockId) -> None:
        self._is_used = True
        if not self._pages.put(block):
            self.on_work()

    def keep_only(self, taken: Collection[BlockId]) -> None:
        for block in self._pages.used():
            if block not in taken:
                self._pages.put(block)
        self.on_work()

    def __iter__(self) -> Iterator[BlockId]:
        used = set(self._pages.used())
        return (block for block in range(self.paging.num_blocks) if block not in used)

    # -- fewer pages

    def limit(self, num_pages: int) -> None:
        """Sets a new ceiling. Raises ValueError if it is out of range."""
        if not 0 < num_pages <= self.paging.num_pages:
            raise ValueError(f"a ceiling of {num_pages} pages is not from 1 to {self.paging.num_pages}")
        self.ceiling, self._is_full = num_pages, False
        for page in list(self._pages.draining):
            if self._surplus < 0:
                self._pages.cancel_drain(page)
        self.on_work()

    @property
    def _surplus(self) -> int:
        """Number of pages above the ceiling that are not draining yet."""
        return self._pages.num_held - len(self._pages.draining) - self.ceiling

    @property
    def is_reclaiming(self) -> bool:
        return bool(self._pages.draining) or self._surplus > 0 or self._num_asked() > 0

    def _num_asked(self) -> int:
        """Returns the number of pages that others wait for, beyond pages that already drain or are being given back."""
        return self._supply.pages_requested() - len(self._pages.draining) - self._pages.num_unmapping

    def choose_reclaimed(self, references: Sequence[int]) -> list[BlockId]:
        asked = self._num_asked()
        if self._surplus > 0 or asked > 0:
            held = self._held_in(references)
            mapped = self._pages.in_state(PageState.MAPPED)
            for page in sorted(mapped, key=lambda page: (held[page], self._pages.used_in(page))):
                if self._surplus > 0 or (asked > 0 and not held[page]):
                    self._pages.drain(page)
                    asked -= 1
                    self.on_work()
        per_page = self.paging.blocks_per_page
        return [block for page in self._pages.draining for block in range(page * per_page, (page + 1) * per_page)]

    def report_spare_pages(self, references: Sequence[int]) -> None:
        """Reports to the supply how many pages could be given back without a preemption."""
        held = np.count_nonzero(self._held_in(references))
        self._supply.report_spare(self._pages.num_held - int(held))

    def _held_in(self, references: Sequence[int]) -> np.ndarray:
        """Returns the number of referenced blocks of each page."""
        by_page = np.asarray(references).reshape(self.paging.num_pages, -1)
        counts: np.ndarray = np.count_nonzero(by_page, axis=1)
        return counts

    # -- background work

    def next_action(self, now: float) -> PopulatePage | DiscardPage | None:
        """Returns the next background action; call again until it returns None. `now` in monotonic seconds."""
        self._update_idle(now)
        page = self._next_to_go()
        if page is not None:
            self._pages.begin_unmapping(page)
            return DiscardPage(page=page)
        if self._pages.num_empty < self._reserve.low and self._is_for_more:
            opened = self._open(1)
            self._unpopulated += opened
            self._is_full = not opened
        while self._unpopulated:
            page = self._unpopulated.pop()
            if self._pages.state(page) is PageState.MAPPED:
                return PopulatePage(page=page)
        return None

    @property
    def _is_for_more(self) -> bool:
        return not (self._is_idle or self._num_wanted or self._surplus > 0 or self._num_asked() > 0)

    def _next_to_go(self) -> int | None:
        pages = self._pages
        for page in pages.draining:
            if not pages.used_in(page):
                return page
        keeps = 0 if self._is_idle or self._num_asked() > 0 else self._reserve.high
        return pages.first_empty() if pages.num_empty > keeps else None

    def on_discarded(self, action: DiscardPage) -> None:
        self._pages.unmapped(action.page)
        self._supply.give(1)
        self._is_full = False

    def wake_at(self) -> float | None:
        """Returns the time at which `next_action` may have work if nothing happens before, or None."""
        return None if self._is_idle else self._used_at + self._reserve.idle_s

    def _update_idle(self, now: float) -> None:
        if self._is_used:
            self._is_used, self._is_idle, self._used_at = False, False, now
        elif now - self._used_at >= self._reserve.idle_s:
            self._is_idle = True

    def validate(self) -> None:
        """Raises AssertionError unless every page and block is accounted for exactly once."""
        self._pages.validate()
        assert self.num_held_pages <= self.paging.num_pages, "more pages than there are"
