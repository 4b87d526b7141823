"""Real threads: allocations race with frees, with the background thread and with limits, over real memory.

Each thread marks the blocks that it holds and looks whether the marks are still there when it gives them back: a page
that was unmapped under a holder, or given to two, would show.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from engine.elastic import CpuBacking, ElasticModel, ElasticPool, Reserve
from engine.elastic.resident import resident_bytes
from protocol.ids import BlockId
from tests.engine.elastic.shapes import LAYOUT, PAGE
from tests.patience import PATIENCE_S

PAGE_BYTES = 4 * PAGE
BUDGET = 24 * PAGE_BYTES
ROUNDS = 300


class _Holder(threading.Thread):
    """Allocates, marks, looks and frees at random."""

    def __init__(self, model: ElasticModel, seed: int) -> None:
        super().__init__()
        shape = (LAYOUT.pieces_per_block, model.num_blocks, LAYOUT.piece_bytes)
        self.pieces = np.frombuffer(model.memory, dtype=np.uint8).reshape(shape)
        self.model = model
        self.mark = seed + 1
        self.random = random.Random(seed)
        self.held: list[list[BlockId]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(ROUNDS):
                self.turn()
            while self.held:
                self.give_back(self.held.pop())
        except BaseException as error:
            self.error = error

    def turn(self) -> None:
        if self.held and self.random.random() < 0.5:
            self.give_back(self.held.pop(self.random.randrange(len(self.held))))
            return
        blocks = self.model.allocate(self.random.randint(1, 9))
        if blocks is None:
            self.model.want(self.random.randint(0, 3))
            return
        assert not (self.pieces[:, blocks, 0] == self.mark).any(), "granted what it holds"
        self.pieces[:, blocks] = self.mark
        self.held.append(blocks)

    def give_back(self, blocks: list[BlockId]) -> None:
        assert (self.pieces[:, blocks] == self.mark).all(), "somebody wrote what is held here"
        self.pieces[:, blocks] = 0
        self.model.free(blocks)


@pytest.mark.parametrize("shared", [False, True], ids=["anonymous", "memfd"])
@pytest.mark.parametrize("high", [0, 3])
def test_holders_never_lose_or_share_a_block(shared: bool, high: int) -> None:
    """Two threads per model, with a reserve that is refilled all the time and without one."""
    reserve = Reserve(low=min(high, 2), high=high, idle_s=0.0)
    backing = CpuBacking(frame_bytes=PAGE, shared=shared)
    with ElasticPool(BUDGET, backing, reserve=reserve) as pool:
        models = [pool.add_model(name, LAYOUT, floor=2 * PAGE_BYTES) for name in "abc"]
        holders = [_Holder(model, 2 * i + j) for i, model in enumerate(models) for j in range(2)]
        for holder in holders:
            holder.start()
        while any(holder.is_alive() for holder in holders):
            pool.validate()
            models[0].limit(2 * PAGE_BYTES, 9 * PAGE_BYTES)
            models[0].limit(0, BUDGET)
        for holder in holders:
            holder.join()
        assert [holder.error for holder in holders] == [None] * len(holders)
        for model in models:
            model.want(0)
            model.limit(0, BUDGET)
        assert pool.wait_for(lambda state: state.frames.num_free == BUDGET // PAGE, PATIENCE_S)
        assert models[0].available() == models[0].most() == BUDGET // PAGE_BYTES * 2
        assert not any(resident_bytes(m.address, m.paging.range_bytes) for m in models)


def test_a_page_is_never_unmapped_while_it_is_pinned() -> None:
    """Pins come and go between allocations of all that is there."""
    with ElasticPool(
        BUDGET, CpuBacking(frame_bytes=PAGE), reserve=Reserve(low=0, high=0, idle_s=0.0)
    ) as pool:
        model, other = (pool.add_model(name, LAYOUT) for name in "ab")
        holder = _Holder(other, 0)
        holder.start()
        for turn in range(ROUNDS):
            page = turn % 8
            pin = model.pin(page * PAGE, PAGE)
            if pin is None:
                continue
            model.memory[page * PAGE] = turn % 255 + 1
            pool.validate()
            assert model.memory[page * PAGE] == turn % 255 + 1
            pin.close()
        holder.join()
        assert holder.error is None


def test_a_model_can_be_removed_while_others_are_used() -> None:
    with ElasticPool(BUDGET, CpuBacking(frame_bytes=PAGE)) as pool:
        holders = [_Holder(pool.add_model(name, LAYOUT), seed) for seed, name in enumerate("ab")]
        for holder in holders:
            holder.start()
        for turn in range(20):
            model = pool.add_model(f"passing-{turn}", LAYOUT)
            blocks = model.allocate(3)
            if blocks is not None:
                model.free(blocks)
            pool.remove_model(model.name)
        for holder in holders:
            holder.join()
        assert [holder.error for holder in holders] == [None, None]
        pool.validate()
