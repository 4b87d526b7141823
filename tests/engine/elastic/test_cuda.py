"""How CUDA's driver is used, shown on one in memory that refuses what CUDA would. No GPU has seen it."""

from __future__ import annotations

import importlib.util
import random
import threading

import pytest

from engine.elastic import ElasticModel, ElasticPool, Reserve
from engine.elastic.cuda import CudaBacking, load_driver
from protocol.errors import ConfigError
from tests.engine.elastic.driver import GRANULARITY, MemoryDriver
from tests.engine.elastic.shapes import LAYOUT
from tests.patience import PATIENCE_S

NUM_FRAMES = 48
NONE = Reserve(low=0, high=0, idle_s=0.0)


def addresses(model: ElasticModel, page: int) -> set[int]:
    return {model.address + offset for offset in model.paging.spans(page)}


def test_just_the_pages_of_held_blocks_are_mapped_and_accessible() -> None:
    driver = MemoryDriver(NUM_FRAMES)
    with ElasticPool(NUM_FRAMES * GRANULARITY, CudaBacking(driver=driver), reserve=NONE) as pool:
        model = pool.add_model("a", LAYOUT)
        blocks = model.allocate(5)
        assert blocks is not None
        expected = {a for block in blocks for a in addresses(model, block // 2)}
        assert set(driver.mapped) == driver.accessible == expected
        with pytest.raises(ConfigError, match="no bytes for the host"):
            _ = model.memory


def test_physical_memory_is_made_once_and_used_again() -> None:
    """By whichever model: making it is the slow call."""
    driver = MemoryDriver(NUM_FRAMES)
    with ElasticPool(NUM_FRAMES * GRANULARITY, CudaBacking(driver=driver), reserve=NONE) as pool:
        models = [pool.add_model(name, LAYOUT) for name in ("a", "b")]
        for turn in range(10):
            blocks = models[turn % 2].allocate(4)
            assert blocks is not None
            models[turn % 2].free(blocks)
            assert pool.wait_for(lambda state: state.frames.num_free == NUM_FRAMES, PATIENCE_S)
        assert driver.calls["cuMemMap"] == 10 * 8
        assert driver.calls["cuMemCreate"] == 8


def test_what_leaves_the_budget_is_given_back_to_the_device() -> None:
    driver = MemoryDriver(NUM_FRAMES)
    with ElasticPool(NUM_FRAMES * GRANULARITY, CudaBacking(driver=driver), reserve=NONE) as pool:
        model = pool.add_model("a", LAYOUT)
        blocks = model.allocate(8) or []
        model.free(blocks[:4])
        assert pool.wait_for(lambda state: state.frames.num_free == NUM_FRAMES - 8, PATIENCE_S)
        assert len(driver.handles) == 16
        pool.resize(8 * GRANULARITY)
        assert len(driver.handles) == 8
        model.free(blocks[4:])


def test_threads_keep_to_the_drivers_rules_and_everything_is_given_back() -> None:
    """No frame is in two places, whatever races; at the end nothing is mapped, reserved or allocated."""
    driver = MemoryDriver(NUM_FRAMES)
    backing = CudaBacking(driver=driver, synchronize=lambda: None)
    reserve = Reserve(low=1, high=2, idle_s=0.0)
    with ElasticPool(NUM_FRAMES * GRANULARITY, backing, reserve=reserve) as pool:
        models = [pool.add_model(name, LAYOUT) for name in "abc"]
        threads = [threading.Thread(target=_use, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats().map_failures == 0
        pool.validate()
    assert not driver.mapped
    assert not driver.reserved
    assert not driver.handles
    assert driver.calls["cuMemCreate"] <= NUM_FRAMES


def _use(model: ElasticModel) -> None:
    rng = random.Random(model.name)
    for _ in range(100):
        blocks = model.allocate(rng.randint(1, 12))
        if blocks is not None:
            model.free(blocks)


def test_what_the_device_does_not_have_is_no_allocation_and_leaves_nothing_mapped() -> None:
    """The budget promises more than there is."""
    driver = MemoryDriver(num_frames=10)
    with ElasticPool(NUM_FRAMES * GRANULARITY, CudaBacking(driver=driver), reserve=NONE) as pool:
        model = pool.add_model("a", LAYOUT)
        assert model.allocate(6) is None
        assert pool.wait_for(lambda state: state.frames.num_free == NUM_FRAMES, PATIENCE_S)
        assert not driver.mapped
        assert len(model.allocate(4) or ()) == 4


def test_all_device_work_is_waited_for_before_memory_is_taken_away() -> None:
    driver = MemoryDriver(NUM_FRAMES)
    with ElasticPool(NUM_FRAMES * GRANULARITY, CudaBacking(driver=driver), reserve=NONE) as pool:
        model = pool.add_model("a", LAYOUT)
        model.free(model.allocate(2) or ())
        assert pool.wait_for(lambda state: state.frames.num_free == NUM_FRAMES, PATIENCE_S)
        assert driver.calls["cuCtxSynchronize"] == 1


def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="CUDA device 7 cannot be used"):
        CudaBacking(7, driver=MemoryDriver(NUM_FRAMES))


def test_bindings_without_a_driver_are_told() -> None:
    """As cuda-bindings does on a machine without one."""

    class Missing(MemoryDriver):
        def cuInit(self, flags: int) -> tuple[str]:
            raise RuntimeError("libcuda.so.1 cannot be found")

    with pytest.raises(ConfigError, match=r"libcuda\.so\.1"):
        CudaBacking(driver=Missing(NUM_FRAMES))


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="cuda-bindings are there")
def test_without_bindings_the_install_line_is_told() -> None:
    with pytest.raises(ConfigError, match="pip install cuda-bindings"):
        load_driver()
