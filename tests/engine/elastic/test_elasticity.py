"""A pool over real shared memory: the memory that the kernel allocates follows the blocks, within the limits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.block_pool import BlockPool
from engine.elastic.config import LedgerConfig
from engine.elastic.elasticity import Elasticity
from engine.elastic.pages import Paging
from engine.kv_pool import KvPool
from protocol.errors import ConfigError, InvalidRequest
from protocol.process import running
from tests.engine.elastic.shapes import LAYOUT, PAGE, resident_bytes
from tests.patience import PATIENCE_S, answered, until
from transfer import TransferEngine
from transfer.config import TransferOptions
from transfer.native import address_of
from transfer.shm.memfd import OwnedMemory

MIB = 1 << 20


class Worker:
    """Memory parts of a worker."""

    def __init__(self, name: str = "worker", **options: object) -> None:
        self.paging = Paging.within(LAYOUT, 4 * MIB)
        self.memory = OwnedMemory(self.paging.range_bytes, "kv", elastic=True)
        self.memory.view[:] = b"x" * self.paging.range_bytes  # measuring leaves every page touched
        config = LedgerConfig(elastic_kv_memory=True, **options)  # type: ignore[arg-type]
        self.elasticity: Elasticity = config.elasticity(name, self.paging, self.memory)
        self.pool = BlockPool(
            self.paging.num_blocks, on_added=lambda *_: None, on_removed=lambda _: None, blanks=self.elasticity.blanks
        )
        self.elasticity.references = self.pool.references
        self.kv = KvPool(LAYOUT, self.paging.num_blocks, self.memory.view)
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
        self.pool.make_way()
        self.changed.set()

    async def until(self, most_pages: int) -> None:
        """Waits until at most this many pages are held. Polls between the steps of the elasticity task."""

        async def has_given_back() -> bool:
            return self.elasticity.blanks.num_held_pages <= most_pages

        await answered(has_given_back)


async def test_resident_memory_follows_the_blocks() -> None:
    worker = Worker()
    assert worker.resident == 0, "what was measured with is given back"
    page, per_page = worker.paging.page_bytes, worker.paging.blocks_per_page
    blocks = worker.pool.allocate(3 * per_page) or []
    worker.fill(blocks)
    assert worker.resident == 3 * page
    async with running(worker.elasticity.run(worker.on_change)):
        worker.pool.release(blocks)
        worker.elasticity.limit(ceiling=page)
        await worker.until(1)
        assert worker.resident <= page
    assert worker.elasticity.num_given_back >= 2
    assert worker.memory.resident_bytes <= page + PAGE


async def test_pages_are_there_before_they_are_written() -> None:
    worker = Worker()
    worker.elasticity._clock = lambda: 0.0  # never counts as idle
    async with running(worker.elasticity.run(worker.on_change)):
        blocks = worker.pool.allocate(1) or []
        await asyncio.to_thread(until, lambda: worker.elasticity.num_populated >= 3)
        assert worker.resident >= 3 * worker.paging.page_bytes
        worker.pool.release(blocks)


async def test_two_under_one_budget_hand_memory_over(tmp_path: Path) -> None:
    options = {"kv_memory_budget": 2 * MIB, "kv_memory_ledger": str(tmp_path / "shares")}
    one, other = Worker("one", **options), Worker("other", **options)
    assert one.pool.num_free == other.pool.num_free
    half, page = one.pool.num_free, one.paging.page_bytes
    blocks = one.pool.allocate(half) or []
    one.fill(blocks)
    assert one.resident == 2 * MIB // page * page
    assert other.pool.allocate(1) is None
    running_both = (running(one.elasticity.run(one.on_change)), running(other.elasticity.run(other.on_change)))
    async with running_both[0], running_both[1], asyncio.timeout(PATIENCE_S):
        one.pool.release(blocks)
        while (taken := other.pool.allocate(half // 2)) is None:
            await other.changed.wait()
            other.changed.clear()
        other.fill(taken)
        other.pool.release(taken)
    held = [each.elasticity.limits().held_bytes for each in (one, other)]
    assert sum(held) <= 2 * MIB
    one.elasticity.close()
    other.elasticity.close()


def test_limits_that_cannot_be_are_refused_and_change_nothing() -> None:
    elasticity = Worker().elasticity
    before = elasticity.limits()
    for wrong in ({"ceiling": 1}, {"ceiling": 1 << 40}, {"floor": 1 << 40}, {"budget": MIB}):
        with pytest.raises(InvalidRequest):
            elasticity.limit(**wrong)
    assert elasticity.limits() == before


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory_budget": MIB},
        {"kv_memory_ledger": "x"},
        {"kv_memory_floor": 1},
        {"kv_memory_budget": MIB, "kv_memory_ledger": "x", "kv_memory_floor": 2 * MIB},
    ],
)
def test_options_that_make_no_sense_are_told(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LedgerConfig(**options).check_ledger()  # type: ignore[arg-type]


def test_elastic_memory_beside_rdma_is_refused() -> None:
    engine = TransferEngine(cluster_token="secret", options=TransferOptions(transports=("tcp",)))
    engine.options = TransferOptions(transports=("rdma", "tcp"))
    with pytest.raises(ConfigError, match="rdma"):
        engine.allocate(4096, elastic=True)
