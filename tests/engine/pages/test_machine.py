"""The core in C and its twin in any interleaving: equal answers, and what a reader of the Protocol expects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from engine.pages.base import Eviction, Mark, PoolConfig, Wish
from engine.pages.native import NativePages
from engine.pages.prototypes import PagesLibrary
from engine.pages.twin import PythonPages
from tests.thoroughness import examples

requests = st.integers(0, 11)
counts = st.integers(1, 9) | st.integers(1, 150)
rooms = st.sampled_from([0, 4, 16, 70, 200])
priorities = st.sampled_from([0, 0, 0, 1, 3])
policies = st.sampled_from([None, *Eviction])


class Twins(RuleBasedStateMachine):
    """Both get the same calls. `held` is what they have answered so far."""

    library: PagesLibrary

    @initialize(
        num_blocks=st.integers(1, 300),
        more=st.integers(0, 100),
        share=st.sampled_from([0.0, 0.25, 1.0]),
        policy=policies,
        max_requests=st.sampled_from([4, 100]),
    )
    def make(
        self,
        num_blocks: int,
        more: int,
        share: float,
        policy: Eviction | None,
        max_requests: int,
    ) -> None:
        self.config = PoolConfig(
            num_blocks=num_blocks,
            max_blocks=num_blocks + more,
            max_requests=max_requests,
            high_share=share,
            eviction=policy,
        )
        self.native = NativePages(self.library, self.config)
        self.twin = PythonPages(self.config)
        self.held: dict[int, list[int]] = {}
        self.out_of_service: set[int] = set(range(num_blocks, num_blocks + more))

    @rule(
        request=requests,
        count=counts,
        priority=priorities,
        room=rooms,
        existing=st.booleans(),
        ahead=st.booleans(),
    )
    def allocate(
        self, request: int, count: int, priority: int, room: int, existing: bool, ahead: bool
    ) -> None:
        wish = Wish(request, count, priority, room, existing, ahead)
        if existing and self.twin.blocks_of(request) is None:
            for core in (self.native, self.twin):
                with pytest.raises(LookupError):
                    core.allocate(wish)
            return
        blocks = self.native.allocate(wish)
        assert blocks == self.twin.allocate(wish)
        self._took(request, count, blocks)

    @rule(request=requests, count=counts, priority=priorities, room=rooms)
    def allocate_evicting(self, request: int, count: int, priority: int, room: int) -> None:
        wish = Wish(request, count, priority, room)
        blocks, evicted = self.native.allocate_evicting(wish)
        assert (blocks, evicted) == self.twin.allocate_evicting(wish)
        assert request not in evicted
        for each in evicted:
            self.held.pop(each, None)
        if blocks is None:
            assert not evicted, "somebody went in vain"
        self._took(request, count, blocks)

    @rule(batch=st.lists(st.tuples(requests, st.integers(1, 20)), max_size=12), room=rooms)
    def allocate_all(self, batch: list[tuple[int, int]], room: int) -> None:
        handles = np.array([request for request, _ in batch], np.uint64)
        wanted = np.array([count for _, count in batch], np.uint32)
        blocks, done = self.native.allocate_all(handles, wanted, 0, room)
        twin_blocks, twin_done = self.twin.allocate_all(handles, wanted, 0, room)
        assert (blocks.tolist(), done) == (twin_blocks.tolist(), twin_done)
        given = blocks.tolist()
        for request, count in batch[:done]:
            self._took(request, count, given[:count])
            given = given[count:]
        assert not given

    def _took(self, request: int, count: int, blocks: list[int] | None) -> None:
        if blocks is None:
            return
        others = [block for held in self.held.values() for block in held]
        assert len(set(blocks)) == count
        assert not set(blocks) & {*others, *self.out_of_service}
        mine = self.held.setdefault(request, [])
        beside = mine[-1] + 1 if mine else None
        limit = self.config.block_limit
        if beside is not None and beside < limit and beside not in {*others, *self.out_of_service}:
            assert blocks[0] == beside, "what lay beside it was free"
        mine += blocks

    @rule(request=requests, count=st.integers(0, 60), priority=priorities)
    def reserve(self, request: int, count: int, priority: int) -> None:
        kept = self.native.reserve(request, count, priority)
        assert kept == self.twin.reserve(request, count, priority)

    @rule(request=requests, to=requests, count=st.integers(1, 5))
    def hand_over(self, request: int, to: int, count: int) -> None:
        mine = self.held.get(request, [])
        there = self.twin.blocks_of(to) is not None
        if there or count > len(mine):
            for core in (self.native, self.twin):
                with pytest.raises(LookupError):
                    core.hand_over(request, to, count)
            return
        done = self.native.hand_over(request, to, count)
        assert done == self.twin.hand_over(request, to, count)
        if done:
            self.held[to], self.held[request] = mine[:count], mine[count:]
            if not self.held[request]:
                del self.held[request]

    @rule(request=requests)
    def free(self, request: int) -> None:
        blocks = self.held.pop(request, [])
        assert self.native.free(request) == self.twin.free(request) == len(blocks)

    @rule(request=requests, mark=st.sampled_from([Mark.REST, Mark.REST, *Mark]))
    def mark(self, request: int, mark: Mark) -> None:
        assert self.native.mark(request, mark) == self.twin.mark(request, mark)

    @rule(count=st.integers(0, 80))
    def shrink(self, count: int) -> None:
        gone = self.native.shrink(count).tolist()
        assert gone == self.twin.shrink(count).tolist()
        assert not {block for held in self.held.values() for block in held} & set(gone)
        self.out_of_service |= set(gone)

    @rule(count=st.integers(0, 80))
    def grow(self, count: int) -> None:
        grown = self.native.grow(count)
        assert grown == self.twin.grow(count) == min(count, len(self.out_of_service))
        self.out_of_service -= set(sorted(self.out_of_service)[:grown])

    @rule(barrier=st.sampled_from([0, 0, 1, 3]))
    def set_barrier(self, barrier: int) -> None:
        self.native.set_barrier(barrier)
        self.twin.set_barrier(barrier)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "native"):
            return
        self.native.validate()
        self.twin.validate()
        stats = self.native.stats()
        assert replace(stats, metadata_bytes=0) == self.twin.stats()
        assert stats.num_held == sum(map(len, self.held.values()))
        for request, blocks in self.held.items():
            assert self.native.blocks_of(request).tolist() == blocks  # type: ignore[union-attr]


def test_both_cores_answer_alike_whatever_happens(library: PagesLibrary) -> None:
    """No block twice, none lost; beside what is held while that is free; nobody evicted in vain."""
    machine = type("Machine", (Twins,), {"library": library})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(60), stateful_step_count=60)
    )
