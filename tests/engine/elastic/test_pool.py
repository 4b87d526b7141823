"""The pool over real memory: what models hold is resident, what they gave back is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine.elastic import CpuBacking, ElasticModel, ElasticPool, Reserve
from engine.elastic.base import MappingFailed
from engine.elastic.cpu import CpuRange
from engine.elastic.resident import resident_bytes
from protocol.errors import ConfigError
from protocol.ids import BlockId
from tests.engine.elastic.shapes import LAYOUT, PAGE
from tests.patience import PATIENCE_S

PAGE_BYTES = 4 * PAGE  # of a model with LAYOUT: 2 blocks
BUDGET = 32 * PAGE_BYTES
NONE = Reserve(low=0, high=0, idle_s=0.0)


@pytest.fixture(params=[False, True], ids=["anonymous", "memfd"])
def pool(request: pytest.FixtureRequest) -> Iterator[ElasticPool]:
    backing = CpuBacking(frame_bytes=PAGE, shared=request.param)
    with ElasticPool(BUDGET, backing, reserve=NONE) as made:
        yield made
        made.validate()


def resident(*models: ElasticModel) -> int:
    return sum(resident_bytes(model.address, model.paging.range_bytes) for model in models)


def allocate(model: ElasticModel, count: int) -> list[BlockId]:
    blocks = model.allocate(count)
    assert blocks is not None
    return blocks


def pieces(model: ElasticModel) -> np.ndarray:
    """[pieces, num_blocks, piece bytes] of a model's range."""
    shape = (LAYOUT.pieces_per_block, model.num_blocks, LAYOUT.piece_bytes)
    return np.frombuffer(model.memory, dtype=np.uint8).reshape(shape)


def until(pool: ElasticPool, *, free_bytes: int) -> None:
    """Waits for the background thread."""
    frames = free_bytes // PAGE
    assert pool.wait_for(lambda state: state.frames.num_free == frames, PATIENCE_S)


def test_resident_memory_follows_what_is_held_and_never_exceeds_the_budget(
    pool: ElasticPool,
) -> None:
    a, b = (pool.add_model(name, LAYOUT) for name in ("a", "b"))
    assert resident(a, b) == 0
    held = allocate(a, 64)
    assert resident(a) == BUDGET
    assert b.allocate(1) is None
    a.free(held[:40])
    until(pool, free_bytes=20 * PAGE_BYTES)
    assert resident(a, b) == BUDGET - 20 * PAGE_BYTES
    allocate(b, 40)
    assert (resident(a), resident(b)) == (12 * PAGE_BYTES, 20 * PAGE_BYTES)


def test_blocks_that_are_held_keep_their_bytes_while_pages_around_them_go(
    pool: ElasticPool,
) -> None:
    a, b = (pool.add_model(name, LAYOUT) for name in ("a", "b"))
    blocks = allocate(a, 64)
    for block in blocks:
        pieces(a)[:, block] = block + 1
    kept = [block for block in blocks if block // 2 % 3 == 0]
    a.free([block for block in blocks if block not in kept])
    until(pool, free_bytes=BUDGET - len(kept) // 2 * PAGE_BYTES)
    others = allocate(b, 30)
    pieces(b)[:, others] = 255
    for block in kept:
        assert (pieces(a)[:, block] == block + 1).all()
    assert resident(a) == len(kept) // 2 * PAGE_BYTES


def test_what_a_model_gets_is_never_what_another_wrote(pool: ElasticPool) -> None:
    a, b = (pool.add_model(name, LAYOUT) for name in ("a", "b"))
    blocks = allocate(a, 64)
    pieces(a)[:, blocks] = 7
    a.free(blocks)
    assert not pieces(b)[:, allocate(b, 64)].any()


def test_pages_are_mapped_ahead_so_that_allocations_need_not_wait() -> None:
    clock = _Clock()
    reserve = Reserve(low=3, high=4, idle_s=60.0)
    backing = CpuBacking(frame_bytes=PAGE)
    with ElasticPool(BUDGET, backing, reserve=reserve, clock=clock) as pool:
        model = pool.add_model("a", LAYOUT)
        blocks = allocate(model, 2)
        assert pool.wait_for(lambda state: state.models()["a"][0].num_empty == 3, PATIENCE_S)
        assert resident(model) == 4 * PAGE_BYTES
        awaited = pool.stats().maps_awaited
        blocks += allocate(model, 6)
        assert pool.stats().maps_awaited == awaited
        assert pool.wait_for(lambda state: state.models()["a"][0].num_empty == 3, PATIENCE_S)
        clock.now = 1000.0  # active until now, so that the reserve stays
        model.free(blocks)
        until(pool, free_bytes=BUDGET - 4 * PAGE_BYTES)
        assert resident(model) == 4 * PAGE_BYTES


def test_an_idle_models_reserve_is_unmapped_by_the_background_thread_alone() -> None:
    with ElasticPool(
        BUDGET, CpuBacking(frame_bytes=PAGE), reserve=Reserve(low=2, high=4, idle_s=0.01)
    ) as pool:
        model = pool.add_model("a", LAYOUT)
        model.free(allocate(model, 8))
        until(pool, free_bytes=BUDGET)
        assert resident(model) == 0


def test_limits_change_live(pool: ElasticPool) -> None:
    a, b = (pool.add_model(name, LAYOUT) for name in ("a", "b"))
    blocks = allocate(a, 32)
    assert a.limit(0, 8 * PAGE_BYTES) == 8 * PAGE_BYTES
    (stats, _other) = pool.stats().models
    assert (stats.pending_bytes, stats.ceiling_bytes) == (8 * PAGE_BYTES, 8 * PAGE_BYTES)
    assert a.allocate(1) is None
    a.free(blocks[16:])
    until(pool, free_bytes=BUDGET - 8 * PAGE_BYTES)
    assert pool.stats().models[0].pending_bytes == 0
    a.limit(10 * PAGE_BYTES, 16 * PAGE_BYTES)
    assert (a.available(), a.most(), b.available(), b.most()) == (16, 32, 44, 44)


def test_a_neighbour_on_the_device_gets_what_a_smaller_budget_lets_go_of() -> None:
    """Two pools, as of two workers, whose budgets together are never more than there is."""
    with (
        ElasticPool(BUDGET, CpuBacking(frame_bytes=PAGE), reserve=NONE) as one,
        ElasticPool(
            PAGE_BYTES, CpuBacking(frame_bytes=PAGE), largest_bytes=BUDGET, reserve=NONE
        ) as other,
    ):
        a, b = one.add_model("a", LAYOUT), other.add_model("b", LAYOUT)
        blocks = allocate(a, 64)
        assert b.available() == 2
        assert one.resize(BUDGET // 2) == BUDGET // 2
        assert a.asked_back() == 32
        a.free(blocks[:32])
        assert one.wait_for(lambda state: state.frames.num_pending == 0, PATIENCE_S)
        assert (resident(a), one.stats().pending_bytes) == (BUDGET // 2, 0)
        assert other.resize(BUDGET // 2) == 0
        assert len(allocate(b, 32)) == 32
        assert resident(a, b) == BUDGET
        for refused in (BUDGET + PAGE, 0):
            with pytest.raises(ConfigError):
                other.resize(refused)


def test_figures_that_cannot_be_kept_are_refused(pool: ElasticPool) -> None:
    a = pool.add_model("a", LAYOUT, floor=20 * PAGE_BYTES)
    for refused in (
        lambda: pool.add_model("a", LAYOUT),
        lambda: pool.add_model("b", LAYOUT, floor=13 * PAGE_BYTES),
        lambda: pool.add_model("b", LAYOUT, floor=2, ceiling=1),
        lambda: a.limit(BUDGET + PAGE_BYTES, BUDGET + PAGE_BYTES),
        lambda: ElasticPool(PAGE - 1, CpuBacking(frame_bytes=PAGE)),
    ):
        with pytest.raises(ConfigError):
            refused()
    pool.add_model("b", LAYOUT, floor=12 * PAGE_BYTES)


def test_a_model_whose_page_is_more_than_the_budget_is_refused() -> None:
    with (
        ElasticPool(3 * PAGE, CpuBacking(frame_bytes=PAGE)) as pool,
        pytest.raises(ConfigError, match="smaller frames"),
    ):
        pool.add_model("a", LAYOUT)


def test_pinned_bytes_stay_resident_while_registered(pool: ElasticPool) -> None:
    a, b = (pool.add_model(name, LAYOUT) for name in ("a", "b"))
    with pytest.raises(ValueError, match="is not in"):
        a.pin(0, a.paging.range_bytes + 1)
    pin = a.pin(PAGE, 2 * PAGE)  # pages 1 and 2, by their first slab
    assert pin is not None
    assert pin.pages == (1, 2)
    address = a.paging.spans(1)[0]
    a.memory[address] = 9
    a.free(allocate(a, 64))
    until(pool, free_bytes=BUDGET - 2 * PAGE_BYTES)
    assert resident(a) == 2 * PAGE_BYTES
    assert a.memory[address] == 9
    assert b.available() == 60
    with pytest.raises(ConfigError, match="pinned"):
        pool.remove_model("a")
    pin.close()
    pin.close()
    until(pool, free_bytes=BUDGET)
    assert resident(a) == 0
    whole = a.pin(0, a.paging.range_bytes)
    assert whole is not None
    assert b.pin(0, PAGE) is None


def test_a_removed_models_memory_is_the_others(pool: ElasticPool) -> None:
    a = pool.add_model("a", LAYOUT, floor=BUDGET)
    b = pool.add_model("b", LAYOUT)
    blocks = allocate(a, 20)
    with pytest.raises(ConfigError, match="in use"):
        pool.remove_model("a")
    a.free(blocks)
    pool.remove_model("a")
    assert resident(a) == 0
    assert len(allocate(b, 64)) == 64
    pool.add_model("a", LAYOUT)


def test_who_waits_is_woken_when_there_is_enough(pool: ElasticPool) -> None:
    a, b = (pool.add_model(name, LAYOUT) for name in ("a", "b"))
    blocks = allocate(a, 64)
    b.want(10)
    assert a.asked_back() == 10
    assert not b.wait_for(10, 0.0)
    emptiest = [block for page in a.emptiest()[:5] for block in page]
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(b.wait_for(10, PATIENCE_S)))
    waiter.start()
    a.free(emptiest)
    waiter.join()
    assert woken == [True]
    assert len(allocate(b, 10)) == 10
    a.free([block for block in blocks if block not in emptiest])


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_page_that_the_machine_does_not_have_is_no_allocation(
    pool: ElasticPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = pool.add_model("a", LAYOUT)

    def refuse(*_arguments: object) -> None:
        raise MappingFailed("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(CpuRange, "map", refuse)
        assert model.allocate(3) is None
    assert pool.stats().map_failures == 2
    assert "no memory" in caplog.text
    assert len(allocate(model, 64)) == 64
