"""A pool over real shared memory: the memory that the kernel allocates follows the blocks, within the limits."""

import asyncio
from pathlib import Path

import pytest

from moonserve.engine.config import ElasticMemoryConfig
from moonserve.engine.kv_cache.elastic_pages import Paging
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.protocol.errors import ConfigError, InvalidRequest
from moonserve.protocol.process.event_loop import background_task
from moonserve.transfer import TransferEngine
from moonserve.transfer.config import TransferOptions
from moonserve.transfer.memory.data_plane import address_of
from moonserve.transfer.memory.memfd import OwnedMemory
from tests.engine.kv_cache.shapes import LAYOUT, PAGE, quiet_pool, resident_bytes
from tests.patience import PATIENCE_S, came_true, until

MIB = 1 << 20


class Worker:
    """Memory parts of a worker."""

    def __init__(self, name: str = "worker", **options: object) -> None:
        self.paging = Paging.within(LAYOUT, 4 * MIB)
        self.memory = OwnedMemory(self.paging.range_bytes, "kv", elastic=True)
        self.memory.view[:] = b"x" * self.paging.range_bytes  # measuring leaves every page touched
        config = ElasticMemoryConfig(elastic_kv_memory=True, **options)  # type: ignore[arg-type]
        self.elastic_memory = config.make_elastic_memory(name, self.paging, self.memory)
        self.pool = quiet_pool(self.paging.num_blocks, free_list=self.elastic_memory.free_list)
        self.elastic_memory.references = self.pool.references
        self.kv = KvTensors(LAYOUT, self.paging.num_blocks, self.memory.view)
        self.changed = asyncio.Event()

    @property
    def resident(self) -> int:
        """Resident bytes according to /proc/self/smaps, without the last page, which is the memory's marker."""
        address = address_of(self.memory.view)
        return resident_bytes(address, self.paging.range_bytes + PAGE) - PAGE

    def fill(self, blocks: list[int]) -> None:
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor[blocks] = 1.0

    def on_change(self) -> None:
        self.pool.reclaim()
        self.changed.set()


async def test_resident_memory_follows_the_blocks() -> None:
    worker = Worker()
    assert worker.resident == 0, "what was measured with is given back"
    page, per_page = worker.paging.page_bytes, worker.paging.blocks_per_page
    blocks = worker.pool.allocate(3 * per_page) or []
    worker.fill(blocks)
    assert worker.resident == 3 * page
    async with background_task(worker.elastic_memory.run(worker.on_change)):
        worker.pool.release(blocks)
        worker.elastic_memory.limit(ceiling=page)
        await came_true(lambda: worker.elastic_memory.free_list.num_held_pages <= 1)
        assert worker.resident <= page
    assert worker.elastic_memory.num_given_back >= 2
    assert worker.memory.resident_bytes <= page + PAGE


async def test_pages_are_populated_before_they_are_written() -> None:
    worker = Worker()
    worker.elastic_memory._clock = lambda: 0.0  # never counts as idle
    async with background_task(worker.elastic_memory.run(worker.on_change)):
        blocks = worker.pool.allocate(1) or []
        await asyncio.to_thread(until, lambda: worker.elastic_memory.num_populated >= 3)
        assert worker.resident >= 3 * worker.paging.page_bytes
        worker.pool.release(blocks)


async def test_two_workers_under_one_budget_exchange_memory(tmp_path: Path) -> None:
    options = {"kv_memory_budget": 2 * MIB, "kv_memory_ledger": str(tmp_path / "shares")}
    one, other = Worker("one", **options), Worker("other", **options)
    assert one.pool.num_free == other.pool.num_free
    half, page = one.pool.num_free, one.paging.page_bytes
    blocks = one.pool.allocate(half) or []
    one.fill(blocks)
    assert one.resident == 2 * MIB // page * page
    assert other.pool.allocate(1) is None
    running_both = (
        background_task(one.elastic_memory.run(one.on_change)),
        background_task(other.elastic_memory.run(other.on_change)),
    )
    async with running_both[0], running_both[1], asyncio.timeout(PATIENCE_S):
        one.pool.release(blocks)
        while (taken := other.pool.allocate(half // 2)) is None:
            await other.changed.wait()
            other.changed.clear()
        other.fill(taken)
        other.pool.release(taken)
    held = [each.elastic_memory.limits().held_bytes for each in (one, other)]
    assert sum(held) <= 2 * MIB
    one.elastic_memory.close()
    other.elastic_memory.close()


def test_invalid_limits_are_refused_and_change_nothing() -> None:
    elastic_memory = Worker().elastic_memory
    before = elastic_memory.limits()
    for wrong in ({"ceiling": 1}, {"ceiling": 1 << 40}, {"floor": 1 << 40}, {"budget": MIB}):
        with pytest.raises(InvalidRequest):
            elastic_memory.limit(**wrong)
    assert elastic_memory.limits() == before


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory_budget": MIB},
        {"kv_memory_ledger": "x"},
        {"kv_memory_floor": 1},
        {"kv_memory_budget": MIB, "kv_memory_ledger": "x", "kv_memory_floor": 2 * MIB},
    ],
)
def test_contradictory_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ElasticMemoryConfig(**options).check_ledger()  # type: ignore[arg-type]


def test_elastic_memory_with_rdma_is_refused() -> None:
    engine = TransferEngine(cluster_token="secret", options=TransferOptions(transports=("tcp",)))
    engine.options = TransferOptions(transports=("rdma", "tcp"))
    with pytest.raises(ConfigError, match="rdma"):
        engine.allocate(4096, elastic=True)
