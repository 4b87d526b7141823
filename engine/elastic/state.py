"""What the models of one elastic pool hold, and what is to be mapped and unmapped next. Pure: calls in, actions out.

Whoever calls runs the actions that come back, in their order, and reports each as `mapped`, `not_mapped`, `unmapped` or
`released`, which may give further actions: a page that was promised others' frames is mapped when these are gone from
where they were. So a frame lies in one page at a time. An allocation is settled when its `Grant` has no page
outstanding.

Models give back pages that are empty: beyond a small reserve at once, the reserve when nothing was allocated or freed
for `idle_s`, and any of them as soon as another model needs the frames; never below their floor, never a pinned page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.elastic.actions import Action, Grant, Map, Release, Reserve, Unmap
from engine.elastic.budget import Budget, Share
from engine.elastic.frames import Frames
from engine.elastic.pages import Pages, PageState
from engine.elastic.paging import Paging
from protocol.ids import BlockId


@dataclass(slots=True, kw_only=True, eq=False)
class _Model:
    pages: Pages
    share: Share
    last_used: int = 0  # by the state's count of uses
    active_at: float = 0.0
    is_touched: bool = False  # used since somebody last told the time
    is_idle: bool = True
    waiting: dict[int, list[Grant]] = field(default_factory=dict)  # by page that is not mapped yet
    ended: bool = False

    @property
    def frames_per_page(self) -> int:
        return self.pages.paging.frames_per_page


class ElasticState:
    """Frames of one budget among models. Not thread-safe."""

    def __init__(self, num_frames: int, reserve: Reserve) -> None:
        self.budget = Budget(num_frames)
        self._reserve = reserve
        self._models: dict[str, _Model] = {}
        self.frames = Frames(num_frames)
        self._promised: deque[tuple[str, int]] = deque()
        self._num_uses = 0

    def resize(self, num_frames: int) -> list[Action]:
        """Another budget from now on. If it is less, frames in use leave it as they are given back. Raises ValueError
        when the floors do not fit."""
        self.budget.resize(num_frames)
        self.frames.resize(num_frames)
        return self._serve()

    # -- models

    def add(self, name: str, paging: Paging, floor: int, ceiling: int) -> None:
        """`floor` and `ceiling` in frames. Raises ValueError for a name that is taken or figures that cannot be."""
        if name in self._models:
            raise ValueError(f"there is a model {name!r} already")
        lowest, highest = paging.whole_pages(floor, ceiling)
        share = Share(floor=lowest, ceiling=highest)
        self.budget.add(share)
        self._models[name] = _Model(pages=Pages(paging), share=share)

    def limit(self, name: str, floor: int, ceiling: int) -> None:
        """New figures, in frames, from now on. What is held above the ceiling is given back as blocks are freed; until
        then nothing more is allocated."""
        model = self._models[name]
        self.budget.change(model.share, *model.pages.paging.whole_pages(floor, ceiling))

    def end(self, name: str) -> None:
        """The model gives back everything (`next_action`) and is then gone. Raises ValueError while a block or a pin of
        it is held."""
        pages = self._models[name].pages
        if pages.num_used or pages.num_pinned:
            raise ValueError(
                f"model {name!r} has {pages.num_used} blocks and {pages.num_pinned} pinned pages in use"
            )
        self.limit(name, 0, 0)
        self._models[name].ended = True

    def remove(self, name: str) -> None:
        """After `end`, when all its pages are unmapped."""
        model = self._models[name]
        if not model.ended or self.has_pages(name):
            raise ValueError(f"model {name!r} has not ended or still has pages")
        self.budget.remove(model.share)
        del self._models[name]

    def has_pages(self, name: str) -> bool:
        """Mapped, on their way in or on their way out."""
        pages = self._models[name].pages
        return pages.num_held + pages.num_leaving > 0

    # -- blocks

    def allocate(self, name: str, count: int) -> Grant | None:
        """`count` blocks, or None and no change. Ends the model's wish. None can mean that pages of the model are just
        on their way out, which can be had again when they are gone: `available` counts them."""
        if count < 0:
            raise ValueError(f"{count} blocks cannot be allocated")
        model = self._models[name]
        if count > self._within(model, model.pages.num_unmapped):
            return None
        self._use(model)
        model.share.wanted = 0
        missing = model.pages.paging.pages_for(count - model.pages.num_free_blocks)
        actions = self._take_pages(name, max(0, missing))
        blocks = model.pages.take(count)
        self._count_empty(model)
        return self._grant(model, model.pages.pages_of(blocks), blocks, actions)

    def free(self, name: str, blocks: Iterable[BlockId]) -> None:
        """Raises ValueError, and changes nothing, for a block that is not in use."""
        model = self._models[name]
        model.pages.give_back(blocks)
        self._use(model)
        self._count_empty(model)

    def available(self, name: str) -> int:
        """Blocks that `allocate` would give, those of pages on their way out included: physical capacity, for
        admission."""
        model = self._models[name]
        return self._within(model, model.pages.num_unmapped + model.pages.num_leaving)

    def _within(self, model: _Model, num_pages: int) -> int:
        """Blocks that can be had if that many pages can be mapped, as far as the budget goes."""
        if model.ended or model.share.excess:
            return 0
        pages = min(self.budget.room(model.share) // model.frames_per_page, num_pages)
        return model.pages.num_free_blocks + pages * model.pages.paging.blocks_per_page

    def most(self, name: str) -> int:
        """Blocks that the model could ever have as the figures are: what needs more can be refused at once."""
        model = self._models[name]
        pages = self.budget.most(model.share) // model.frames_per_page
        return min(pages, model.pages.paging.num_pages) * model.pages.paging.blocks_per_page

    def want(self, name: str, count: int) -> None:
        """The model waits for this many blocks (0: for none any more): others that hold more than it get nothing new,
        and who holds most is asked to give back."""
        model = self._models[name]
        missing = model.pages.paging.pages_for(max(0, count - model.pages.num_free_blocks))
        model.share.wanted = missing * model.frames_per_page

    def asked_back(self, name: str) -> int:
        """Blocks that the model should free, if it can, because others wait; whole pages of them, those of
        `emptiest` first."""
        model = self._models[name]
        pages = -(-self.budget.asked_back(model.share) // model.frames_per_page)
        return pages * model.pages.paging.blocks_per_page

    def emptiest(self, name: str) -> list[int]:
        """Pages with blocks in use, the one with the fewest first."""
        return self._models[name].pages.emptiest()

    # -- pins

    def pin(self, name: str, pages: Sequence[int]) -> Grant | None:
        """Keeps these pages mapped until `unpin`, mapping those that are not. None, and no change, when there is no
        room for them or one is just on its way out."""
        model = self._models[name]
        if self.are_leaving(name, pages):
            return None
        missing = [p for p in pages if model.pages.state(p) is PageState.UNMAPPED]
        room = 0 if model.share.excess else self.budget.room(model.share)
        if len(missing) * model.frames_per_page > room:
            return None
        self._use(model)
        actions = self._reclaim(model, len(missing))
        for page in missing:
            model.pages.promise(page)
            self._promised.append((name, page))
        for page in pages:
            model.pages.pin(page)
        actions += self._serve()
        self._count_empty(model)
        grant = self._grant(model, set(pages), [], actions)
        grant.pinned = pages
        return grant

    def unpin(self, name: str, pages: Iterable[int]) -> None:
        model = self._models[name]
        for page in pages:
            model.pages.unpin(page)
        self._count_empty(model)

    # -- what became of actions

    def mapped(self, action: Map) -> list[Action]:
        model = self._models[action.model]
        model.pages.mapped(action.page)
        for grant in model.waiting.pop(action.page, ()):
            grant.outstanding.discard(action.page)
        self._count_empty(model)
        return []

    def not_mapped(self, action: Map) -> list[Action]:
        """The machine refused. Everybody who was given a block of the page loses what that call gave."""
        model = self._models[action.model]
        for grant in list(model.waiting.get(action.page, ())):
            self._fail(model, grant)
        model.waiting.pop(action.page, None)
        self.frames.put_back(model.pages.not_mapped(action.page))
        self._count_empty(model)
        return self._serve()

    def unmapped(self, action: Unmap) -> list[Action]:
        model = self._models[action.model]
        self.frames.put_back(model.pages.unmapped(action.page))
        return self._serve()

    def released(self, action: Release) -> list[Action]:
        self.frames.given_back(len(action.frames))
        return []

    def are_leaving(self, name: str, pages: Iterable[int]) -> bool:
        """Whether one of these is just being unmapped: it can be had again in a moment."""
        states = map(self._models[name].pages.state, pages)
        return PageState.UNMAPPING in states

    # -- what is done when nobody asks

    def next_action(self, now: float) -> Action | None:
        """One thing that should be done in the background, which counts as begun; call it again until None. `now` in
        monotonic seconds."""
        for name, model in self._models.items():
            self._tell_time(model, now)
            if self._is_giving(model):
                return self._begin_unmapping(name, model.pages.first_empty())
        for name, model in self._models.items():
            if self._is_short(model):
                self._promised.append((name, model.pages.promise()))
                self._count_empty(model)
                (action,) = self._serve()
                return action
        return None

    def has_work(self) -> bool:
        """Whether `next_action` should be called, if only to tell the time."""
        return any(
            (model.is_touched and (model.is_idle or not model.pages.num_used))
            or self._is_giving(model)
            or self._is_short(model)
            for model in self._models.values()
        )

    def wake_at(self) -> float | None:
        """When `next_action` has something that it has not now, if nothing happens until then."""
        ends = [
            model.active_at + self._reserve.idle_s
            for model in self._models.values()
            if not model.is_idle and not model.pages.num_used
        ]
        return min(ends, default=None)

    def _tell_time(self, model: _Model, now: float) -> None:
        if model.is_touched:
            model.is_touched, model.is_idle, model.active_at = False, False, now
        if not model.pages.num_used and now - model.active_at >= self._reserve.idle_s:
            model.is_idle = True

    def _is_giving(self, model: _Model) -> bool:
        share = model.share
        if not share.empty:
            return False
        if share.excess or model.ended:
            return True
        if share.spare < model.frames_per_page:
            return False
        keeps = 0 if model.is_idle else self._reserve.high
        return model.pages.num_empty > keeps or self._somebody_lacks(share)

    def _somebody_lacks(self, giver: Share) -> bool:
        """Whether what is free does not do for another that waits, or whose floor was raised."""
        others = [model.share for model in self._models.values() if model.share is not giver]
        floors = sum(share.unmet for share in others)
        return max(floors, *map(self.budget.lacking, others), 0) > self.budget.free

    def _is_short(self, model: _Model) -> bool:
        """Whether a page should be mapped ahead: only from frames that nobody has to give back for it."""
        ahead = model.pages.num_empty + model.pages.num_empty_coming
        if ahead >= self._reserve.low or model.is_idle or model.ended or self._promised:
            return False
        if not model.pages.num_unmapped or self._anybody_lacks():
            return False
        room = min(self.budget.room_untouched(model.share), self.frames.num_free)
        return room >= model.frames_per_page

    def _anybody_lacks(self) -> bool:
        return any(self.budget.lacking(model.share) for model in self._models.values())

    # -- giving and taking

    def _take_pages(self, name: str, count: int) -> list[Action]:
        model = self._models[name]
        actions = self._reclaim(model, count)
        for _ in range(count):
            self._promised.append((name, model.pages.promise()))
        return actions + self._serve()

    def _reclaim(self, taker: _Model, num_pages: int) -> list[Action]:
        """Begins to unmap others' empty pages until what is free, and will be, is enough for the taker and for the
        floors of all others; those of who has been idle longest first."""
        if not num_pages:
            return []
        needed = num_pages * taker.frames_per_page + self.budget.owed(taker.share)
        missing = needed - self.budget.free
        actions: list[Action] = []
        by_use = sorted(self._models.items(), key=lambda item: item[1].last_used)
        for name, model in by_use:
            while missing > 0 and model is not taker and model.share.spare >= model.frames_per_page:
                actions.append(self._begin_unmapping(name, model.pages.first_empty()))
                missing -= model.frames_per_page
        return actions

    def _begin_unmapping(self, name: str, page: int) -> Unmap:
        model = self._models[name]
        model.pages.begin_unmapping(page)
        self._count_empty(model)
        return Unmap(model=name, page=page, frames=model.pages.frames(page))

    def _serve(self) -> list[Action]:
        """Maps promised pages in the order in which they were promised, as far as frames are there; then lets go of
        those that the budget has no more."""
        actions: list[Action] = []
        while self._promised:
            name, page = self._promised[0]
            model = self._models[name]
            if self.frames.num_free < model.frames_per_page:
                break
            self._promised.popleft()
            frames = self.frames.take(model.frames_per_page)
            model.pages.begin_mapping(page, frames)
            actions.append(Map(model=name, page=page, frames=frames))
        retired = self.frames.retire(self._num_promised_frames())
        return [*actions, Release(frames=retired)] if retired else actions

    def _num_promised_frames(self) -> int:
        return sum(self._models[name].frames_per_page for name, _page in self._promised)

    def _grant(
        self, model: _Model, pages: set[int], blocks: list[BlockId], actions: list[Action]
    ) -> Grant:
        outstanding = {p for p in pages if model.pages.state(p) is not PageState.MAPPED}
        grant = Grant(blocks=blocks, outstanding=outstanding, actions=actions)
        for page in outstanding:
            model.waiting.setdefault(page, []).append(grant)
        return grant

    def _fail(self, model: _Model, grant: Grant) -> None:
        grant.failed = True
        for page in grant.outstanding:
            model.waiting[page].remove(grant)
        model.pages.give_back(grant.blocks)
        for page in grant.pinned:
            model.pages.unpin(page)
        grant.blocks, grant.pinned, grant.outstanding = [], (), set()

    def _use(self, model: _Model) -> None:
        self._num_uses += 1
        model.last_used, model.is_touched = self._num_uses, True

    def _count_empty(self, model: _Model) -> None:
        model.share.held = model.pages.num_held * model.frames_per_page
        model.share.empty = model.pages.num_empty * model.frames_per_page

    # -- looking

    def models(self) -> Mapping[str, tuple[Pages, Share]]:
        """To look at, not to change."""
        return {name: (model.pages, model.share) for name, model in self._models.items()}

    def validate(self) -> None:
        """Raises AssertionError unless every frame, page and block is accounted for exactly once."""
        self.budget.validate(self.frames.num_alive)
        frames = list(self.frames)
        leaving = 0
        for model in self._models.values():
            model.pages.validate()
            frames += model.pages.all_frames()
            leaving += model.pages.num_leaving * model.frames_per_page
            held = model.pages.num_held * model.frames_per_page
            assert model.share.held == held, "what a share holds drifted"
            assert model.share.empty == model.pages.num_empty * model.frames_per_page
        assert len(frames) == len(set(frames)), "a frame lies in two pages"
        assert len(frames) == self.frames.num_alive >= self.budget.num_frames, "a frame is lost"
        promised = [(n, p) for n, m in self._models.items() for p in m.pages.promised()]
        assert sorted(promised) == sorted(self._promised), "promises drifted"
        will_be_free = self.frames.num_free + leaving
        assert self._num_promised_frames() <= will_be_free, "more is promised than will be free"
