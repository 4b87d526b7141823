"""The blank blocks of a pool whose memory comes and goes by pages: which may be used, and which page goes next. Pure.

A block is handed out of the fullest page that has one, so that others empty; a page whose blocks are all blank is given
back to the machine: beyond a small reserve at once, the reserve when nothing was taken or put back for a while, and any
of them when another worker waits. Where there must be fewer pages than have blocks in use, because the ceiling was
lowered, those with the fewest held blocks *leave*: none of their blocks is handed out any more, and who holds the rest
lets go of them (`BlockPool.make_way`). For another worker's need only pages leave in which nothing is held.

A page counts from when its first block may be handed out until the machine has it back. What is written in a page that
was never populated makes it resident all the same, so nothing here needs to be waited for.

A `Supply` is where pages get their memory from: as much as one likes, or a share of what several workers have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.block_pool import Blanks
from engine.elastic.pages import Pages, PageState, Paging
from protocol.ids import BlockId


class Supply:
    """Counts pages. What is taken is the worker's until it is given back. These are one worker's; a `Seat` shares."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = self._left = num_pages

    def take(self, count: int) -> int:
        """At most `count` pages, as many as can be had now."""
        taken = min(count, self._left)
        self._left -= taken
        return taken

    def give(self, count: int) -> None:
        """The machine has so many back."""
        self._left += count

    def room(self) -> int:
        """What `take` would give, as far as is known."""
        return self._left

    def most(self) -> int:
        """Pages that could ever be held, as floors are."""
        return self._num_pages

    def want(self, count: int) -> None:
        """The worker waits for so many, until it says another number."""

    def spare(self, count: int) -> None:
        """So many of what it holds could be given back without anybody's loss but cached blocks'."""

    def asked_back(self) -> int:
        """Pages that others wait for and that this worker should give back, of those that are spare."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """How many empty pages an active pool keeps: fewer than `low` are filled up, more than `high` are given
    back. The numbers are kvcached's."""

    low: int = 5
    high: int = 10
    idle_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Populate:
    """Have the page's memory there before somebody writes it."""

    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """Its blocks are blank and nobody can take one: the machine may have it. Report it as `given_back`."""

    page: int


class PagedBlanks(Blanks):
    """Of a whole pool. Not thread-safe."""

    def __init__(
        self,
        paging: Paging,
        supply: Supply,
        *,
        reserve: Reserve | None = None,
        on_work: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_work`: `next_action` may have something to do."""
        self.paging = paging
        self.ceiling = paging.num_pages  # in pages
        self.on_work = on_work
        self._supply = supply
        self._reserve = reserve or Reserve()
        self._pages = Pages(paging)
        self._unpopulated: list[int] = []  # opened ahead
        self._is_used = False  # since somebody last told the time
        self._used_at = 0.0
        self._is_idle = True
        self._is_full = False  # the last page that was to be opened ahead could not be
        self._num_wanted = 0  # pages; the most that was asked for since `want_nothing`
        self._num_told = 0  # likewise, as others know it

    # -- what is there

    @property
    def num_held_pages(self) -> int:
        """What the machine spends, or is about to."""
        return self._pages.num_held + self._pages.num_leaving

    @property
    def num_leaving_pages(self) -> int:
        """Of which no block is handed out any more, but some are held or the machine has them not back yet."""
        return len(self._pages.leaving) + self._pages.num_leaving

    @property
    def num_wanted_pages(self) -> int:
        """What somebody waits for."""
        return self._num_wanted

    @property
    def num_ready(self) -> int:
        return self._pages.num_free_blocks

    @property
    def num_in_reach(self) -> int:
        return self.num_ready + self._num_pages_in_reach() * self.paging.blocks_per_page

    @property
    def capacity(self) -> int:
        return min(self.ceiling, self._supply.most()) * self.paging.blocks_per_page

    def _num_pages_in_reach(self) -> int:
        below = min(self.ceiling - self.num_held_pages, self._pages.num_unmapped)
        return min(below, self._supply.room()) if below > 0 else 0

    # -- blocks

    def prepare(self, count: int) -> None:
        self._open(self.paging.pages_for(count - self.num_ready))
        if self._num_wanted and count <= self.num_ready:
            self.on_work()  # perhaps nobody waits any more

    def want(self, count: int) -> None:
        self._num_wanted = max(self._num_wanted, self.paging.pages_for(count))
        if self._num_wanted > self._num_told:
            self.tell_wish()
            self.on_work()

    def want_nothing(self) -> None:
        """Who still waits says so again."""
        self._num_wanted = 0

    def tell_wish(self) -> None:
        """Has others know of it, and that it lasts."""
        self._num_told = self._num_wanted
        below = max(0, self.ceiling - self.num_held_pages)
        self._supply.want(min(self._num_wanted, below))

    def _open(self, count: int) -> list[int]:
        below = min(count, self.ceiling - self.num_held_pages, self._pages.num_unmapped)
        return [self._pages.open() for _ in range(self._supply.take(below) if below > 0 else 0)]

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
        if not self._pages.give_one(block):
            self.on_work()

    def keep_only(self, taken: Collection[BlockId]) -> None:
        for block in self._pages.used():
            if block not in taken:
                self._pages.give_one(block)
        self.on_work()

    def __iter__(self) -> Iterator[BlockId]:
        used = set(self._pages.used())
        return (block for block in range(self.paging.num_blocks) if block not in used)

    # -- fewer pages

    def limit(self, num_pages: int) -> None:
        """A new ceiling, from now on."""
        if not 0 < num_pages <= self.paging.num_pages:
            raise ValueError(f"{num_pages} pages of {self.paging.num_pages}")
        self.ceiling, self._is_full = num_pages, False
        for page in list(self._pages.leaving):
            if self._surplus < 0:
                self._pages.stay(page)
        self.on_work()

    @property
    def _surplus(self) -> int:
        """Pages that have to leave, beyond those that do."""
        return self._pages.num_held - len(self._pages.leaving) - self.ceiling

    @property
    def is_leaving(self) -> bool:
        return bool(self._pages.leaving) or self._surplus > 0 or self._num_asked() > 0

    def _num_asked(self) -> int:
        """Pages that others wait for, beyond those that are on their way out."""
        return self._supply.asked_back() - len(self._pages.leaving) - self._pages.num_leaving

    def choose_leaving(self, references: Sequence[int]) -> list[BlockId]:
        asked = self._num_asked()
        if self._surplus > 0 or asked > 0:
            held = self._held_in(references)
            mapped = self._pages.in_state(PageState.MAPPED)
            for page in sorted(mapped, key=lambda page: (held[page], self._pages.used_in(page))):
                if self._surplus > 0 or (asked > 0 and not held[page]):
                    self._pages.leave(page)
                    asked -= 1
                    self.on_work()
        per_page = self.paging.blocks_per_page
        return [block for page in self._pages.leaving for block in range(page * per_page, (page + 1) * per_page)]

    def tell_spare(self, references: Sequence[int]) -> None:
        """Has others know how many pages could be given back without preempting anybody."""
        held = np.count_nonzero(self._held_in(references))
        self._supply.spare(self._pages.num_held - int(held))

    def _held_in(self, references: Sequence[int]) -> np.ndarray:
        """Blocks with a reference, by page."""
        by_page = np.asarray(references).reshape(self.paging.num_pages, -1)
        counts: np.ndarray = np.count_nonzero(by_page, axis=1)
        return counts

    # -- what is done when nobody asks

    def next_action(self, now: float) -> Populate | GiveBack | None:
        """One thing to be done in the background; call it again until None. `now` in monotonic seconds."""
        self._tell_time(now)
        page = self._next_to_go()
        if page is not None:
            self._pages.begin_unmapping(page)
            return GiveBack(page=page)
        if self._pages.num_empty < self._reserve.low and self._is_for_more:
            opened = self._open(1)
            self._unpopulated += opened
            self._is_full = not opened
        while self._unpopulated:
            page = self._unpopulated.pop()
            if self._pages.state(page) is PageState.MAPPED:
                return Populate(page=page)
        return None

    @property
    def _is_for_more(self) -> bool:
        return not (self._is_idle or self._num_wanted or self._surplus > 0 or self._num_asked() > 0)

    def _next_to_go(self) -> int | None:
        pages = self._pages
        for page in pages.leaving:
            if not pages.used_in(page):
                return page
        keeps = 0 if self._is_idle or self._num_asked() > 0 else self._reserve.high
        return pages.first_empty() if pages.num_empty > keeps else None

    def given_back(self, action: GiveBack) -> None:
        self._pages.unmapped(action.page)
        self._supply.give(1)
        self._is_full = False

    def wake_at(self) -> float | None:
        """When `next_action` has something that it has not now, if nothing happens until then."""
        return None if self._is_idle else self._used_at + self._reserve.idle_s

    def _tell_time(self, now: float) -> None:
        if self._is_used:
            self._is_used, self._is_idle, self._used_at = False, False, now
        elif now - self._used_at >= self._reserve.idle_s:
            self._is_idle = True

    def validate(self) -> None:
        """Raises AssertionError unless every page and block is accounted for exactly once."""
        self._pages.validate()
        assert self.num_held_pages <= self.paging.num_pages, "more pages than there are"
