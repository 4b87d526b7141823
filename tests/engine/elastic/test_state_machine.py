"""Random allocations, frees, limits, wishes, pins and failures, with actions run late and in any order.

Nothing is lost or held twice, nobody takes more than its ceiling or what others' floors need, and when all is freed
everything can be had again.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.elastic.actions import Action, Grant, Map, Reserve, Unmap
from engine.elastic.pages import PageState
from engine.elastic.state import ElasticState
from protocol.ids import BlockId
from tests.engine.elastic.shapes import paging, run, settle
from tests.thoroughness import examples

NAMES = ("a", "b", "c")
NUM_FRAMES = 48
# (blocks, frames) of a page.
SHAPES = {"a": (2, 4), "b": (3, 6), "c": (1, 2)}
names = st.sampled_from(NAMES)
shares = st.tuples(st.integers(0, 16), st.integers(0, NUM_FRAMES))


class ElasticMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pending: list[Action] = []
        self.granted: list[tuple[str, Grant]] = []  # not all mapped yet
        self.held: list[tuple[str, list[BlockId]]] = []
        self.pins: list[tuple[str, list[int]]] = []

    @initialize(low=st.integers(0, 2), extra=st.integers(0, 2), figures=st.tuples(*[shares] * 3))
    def begin(self, low: int, extra: int, figures: tuple[tuple[int, int], ...]) -> None:
        self.state = ElasticState(NUM_FRAMES, Reserve(low=low, high=low + extra, idle_s=3.0))
        for name, (floor, more) in zip(NAMES, figures, strict=True):
            blocks, frames = SHAPES[name]
            pages = -(-NUM_FRAMES // frames)
            shape = paging(pages, blocks_per_page=blocks, frames_per_page=frames)
            self.state.add(name, shape, floor // 2, floor // 2 + more)

    @rule(name=names, count=st.integers(0, 12))
    def allocate(self, name: str, count: int) -> None:
        committed = self.state.budget.committed
        available = self.state.available(name)
        grant = self.state.allocate(name, count)
        if grant is None:
            assert count > available or self.state.models()[name][0].num_leaving
            return
        assert count <= available
        share = self.state.models()[name][1]
        assert not share.excess or count == 0
        assert self.state.budget.committed <= max(committed, self.state.budget.num_frames)
        assert len(set(grant.blocks)) == count
        self.pending += grant.actions
        self.granted.append((name, grant))

    @rule(name=names, pages=st.sets(st.integers(0, 7), min_size=1, max_size=4))
    def pin(self, name: str, pages: set[int]) -> None:
        grant = self.state.pin(name, sorted(pages))
        if grant is not None:
            self.pending += grant.actions
            self.granted.append((name, grant))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), fails=st.integers(0, 7))
    def run_an_action(self, data: st.DataObject, fails: int) -> None:
        action = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        if isinstance(action, Unmap):
            self.pending += self.state.unmapped(action)
        elif not isinstance(action, Map):
            self.pending += self.state.released(action)
        elif fails == 0:
            self.pending += self.state.not_mapped(action)
        else:
            self.pending += self.state.mapped(action)
        self._collect()

    def _collect(self) -> None:
        """What a caller would have been given by now."""
        waiting = []
        for name, grant in self.granted:
            if grant.outstanding:
                waiting.append((name, grant))
            elif not grant.failed:
                if grant.blocks:
                    self.held.append((name, grant.blocks))
                if grant.pinned:
                    self.pins.append((name, list(grant.pinned)))
        self.granted = waiting

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        name, blocks = self.held[index]
        count = data.draw(st.integers(1, len(blocks)))
        self.state.free(name, blocks[:count])
        if count == len(blocks):
            del self.held[index]
        else:
            self.held[index] = (name, blocks[count:])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name, pages = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.state.unpin(name, pages)

    @rule(name=names, floor=st.integers(0, 20), more=st.integers(0, NUM_FRAMES))
    def limit(self, name: str, floor: int, more: int) -> None:
        others = sum(s.floor for n, (_p, s) in self.state.models().items() if n != name)
        if floor + SHAPES[name][1] + others <= self.state.budget.num_frames:
            self.state.limit(name, floor, floor + more)

    @rule(num_frames=st.integers(1, NUM_FRAMES + 8))
    def resize(self, num_frames: int) -> None:
        floors = sum(share.floor for _pages, share in self.state.models().values())
        if num_frames >= floors:
            self.pending += self.state.resize(num_frames)

    @rule(name=names, count=st.integers(0, 12))
    def want(self, name: str, count: int) -> None:
        self.state.want(name, count)

    @rule(passed=st.sampled_from([0.0, 1.0, 5.0]))
    def work(self, passed: float) -> None:
        """The background thread takes one thing on."""
        self.now += passed
        within = {n for n, (_p, s) in self.state.models().items() if not s.excess}
        committed = self.state.budget.committed
        action = self.state.next_action(self.now)
        if action is None:
            return
        self.pending.append(action)
        assert self.state.budget.committed <= max(committed, self.state.budget.num_frames)
        assert within <= {n for n, (_p, s) in self.state.models().items() if not s.excess}

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.state.validate()
        self._collect()
        known = [(name, b) for name, blocks in self.held for b in blocks]
        known += [(name, b) for name, grant in self.granted for b in grant.blocks]
        assert len(known) == len(set(known)), "a block is held twice"
        used = sum(pages.num_used for pages, _share in self.state.models().values())
        assert used == len(known)

    @invariant()
    def what_is_held_and_pinned_is_mapped(self) -> None:
        models = self.state.models()
        for name, blocks in self.held:
            pages = models[name][0]
            assert {pages.state(p) for p in pages.pages_of(blocks)} == {PageState.MAPPED}
        for name, pinned in self.pins:
            assert {models[name][0].state(page) for page in pinned} == {PageState.MAPPED}

    @invariant()
    def floors_can_be_had(self) -> None:
        """Whatever the others hold, unless a floor was raised above what they had left."""
        if self.state.budget.committed > self.state.budget.num_frames:
            return
        for name, (pages, share) in self.state.models().items():
            if share.excess:
                continue
            floor_blocks = share.floor // SHAPES[name][1] * SHAPES[name][0]
            assert pages.num_used + self.state.available(name) >= floor_blocks

    def teardown(self) -> None:
        """All is freed: idle models keep their floors at most, and each can have all that its figures allow."""
        if not hasattr(self, "state"):
            return
        run(self.state, self.pending)
        self._collect()
        for name, blocks in self.held:
            self.state.free(name, blocks)
        for name, pages in self.pins:
            self.state.unpin(name, pages)
        for name in NAMES:
            self.state.want(name, 0)
        settle(self.state, self.now)
        settle(self.state, self.now + 10.0)
        assert self.state.frames.num_pending == 0
        for name, (_pages, share) in self.state.models().items():
            assert share.held <= share.floor
            assert self.state.available(name) == self.state.most(name)


TestElasticMachine = ElasticMachine.TestCase
TestElasticMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=50, deadline=None
)
