"""Shell of elastic memory: a worker's share of the host's budget, the background page work, the RPC and the metrics.

Makes no decisions: `engine.kv_cache.paged_free_list` chooses pages, `engine.kv_cache.elastic_budget` divides the
budget. Workers with fixed memory serve the RPC too, and refuse it with that reason.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.kv_cache.elastic_budget import Ledger
from moonserve.engine.kv_cache.elastic_pages import Paging
from moonserve.engine.kv_cache.paged_free_list import DiscardPage, PagedFreeList, PageSupply, PopulatePage
from moonserve.protocol.errors import ConfigError, InvalidRequest
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.pb.worker_pb2 import KvLimits
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.rpc.grpc_transport import Context

POLL_S = 0.5
"""Poll interval while this worker waits for pages: a worker that died rings no bell."""
REPORT_S = 1.0
"""Interval at which spare pages are reported to the other workers."""


class SharedPageSupply(PageSupply):
    """Page supply of one worker that shares a budget with others, with a bell that the others ring when something has
    changed for this worker. Not thread-safe.

    The bell is a datagram socket in Linux's abstract namespace, so a dead worker leaves nothing behind. If a ring is
    lost, the waiting worker notices at its next poll."""

    def __init__(self, ledger: Ledger, name: str, *, page_bytes: int, floor: int, ceiling: int) -> None:
        """Claims a row of the ledger and binds the bell. `floor` and `ceiling` in bytes. Raises ConfigError."""
        self._ledger = ledger
        self._page_bytes = page_bytes
        self._number = ledger.claim(name, self._whole(floor), ceiling)
        self._asked = 0
        self.bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bell.setblocking(False)
        try:
            self.bell.bind(self._address(self._number))
        except OSError as error:
            raise ConfigError(f"the other workers cannot notify {name}: {error}") from error

    def take(self, count: int) -> int:
        return self._ledger.take(self._number, count, self._page_bytes)

    def give(self, count: int) -> None:
        self._ledger.give(self._number, count * self._page_bytes)
        self._ring(only_waiting=True)
        self.refresh()

    def num_available(self) -> int:
        own, budget = self._ledger.share_of(self._number)
        return budget.available_bytes(own) // self._page_bytes

    def max_pages(self) -> int:
        own, budget = self._ledger.share_of(self._number)
        return budget.max_bytes(own) // self._page_bytes

    def report_wanted(self, count: int) -> None:
        self._ledger.set_wanted(self._number, count * self._page_bytes)
        if count:
            self._ring()

    def report_spare(self, count: int) -> None:
        self._ledger.set_empty(self._number, count * self._page_bytes)

    def pages_requested(self) -> int:
        return self._asked

    def refresh(self) -> None:
        """Updates `pages_requested`, the number of pages that others request from this worker. A worker that waits
        itself gives only to workers that hold less, any other worker all that it can spare."""
        own, budget = self._ledger.share_of(self._number)
        asked = -(-budget.bytes_requested(own) // self._page_bytes)
        self._asked = min(asked, max(0, own.held - own.floor) // self._page_bytes)

    def limit(self, floor: int, ceiling: int) -> None:
        """Changes floor and ceiling, in bytes. Raises ConfigError."""
        self._ledger.limit(self._number, self._whole(floor), ceiling)

    def _whole(self, floor: int) -> int:
        """Rounds a floor down to whole pages. Otherwise others would count the part of a page above the floor as spare,
        and wait for bytes that can never be given back."""
        return floor // self._page_bytes * self._page_bytes

    @property
    def budget(self) -> int:
        """Budget of all workers, in bytes."""
        return self._ledger.budget

    def resize(self, budget: int) -> None:
        """Changes the budget of all workers, in bytes. Raises ConfigError."""
        self._ledger.resize(budget)
        self._ring()
        self.refresh()

    def drain_bell(self) -> None:
        """Drains the bell."""
        with contextlib.suppress(BlockingIOError):
            while self.bell.recv(1):
                pass

    def close(self) -> None:
        self.bell.close()
        self._ledger.close()

    def _ring(self, *, only_waiting: bool = False) -> None:
        for row in self._ledger.rows():
            if row.number != self._number and (row.wanted or not only_waiting):
                with contextlib.suppress(OSError):  # the worker is gone, or its bell is already ringing
                    self.bell.sendto(b"!", self._address(row.number))

    def _address(self, number: int) -> str:
        return f"\0moonserve-kv-{self._ledger.identity}-{number}"


class PageableMemory(Protocol):
    """Memory that can be populated and discarded in parts (`transfer.memory.memfd.OwnedMemory`)."""

    @property
    def resident_bytes(self) -> int: ...
    def populate(self, offset: int, nbytes: int) -> None: ...
    def discard(self, offset: int, nbytes: int) -> None: ...


class ElasticMemory:
    """Manager of one pool's elastic memory: applies limits, populates pages ahead and gives pages back. `references`:
    reference counts of the blocks, set once there is a pool.

    `run` is a task next to the worker's own. Another thread handles pages, one at a time: if a page were populated
    while it is given back, it would stay resident without being counted."""

    def __init__(
        self,
        paging: Paging,
        memory: PageableMemory,
        supply: SharedPageSupply | None = None,
        *,
        floor: int = 0,
    ) -> None:
        self.paging = paging
        self._memory = memory
        self._supply = supply
        self._floor = floor
        self._due = asyncio.Event()
        self.references: Sequence[int] = ()
        self.num_populated = self.num_given_back = 0  # pages
        self.free_list = PagedFreeList(paging, supply or PageSupply(paging.num_pages), on_work=self._due.set)

    # -- limits

    def limits(self) -> KvLimits:
        page_bytes = self.paging.page_bytes
        return KvLimits(
            floor_bytes=self._floor,
            ceiling_bytes=self.free_list.ceiling * page_bytes,
            largest_bytes=self.paging.range_bytes,
            held_bytes=self.free_list.num_held_pages * page_bytes,
            resident_bytes=self._memory.resident_bytes,
            wanted_bytes=self.free_list.num_wanted_pages * page_bytes,
            budget_bytes=None if self._supply is None else self._supply.budget,
        )

    def limit(self, *, floor: int | None = None, ceiling: int | None = None, budget: int | None = None) -> None:
        """Changes limits, in bytes; None leaves a limit unchanged. Raises InvalidRequest for a ceiling below a page or
        above the address range, and ConfigError for floors that do not fit. The caller must notify the worker's state
        afterwards, so that it releases blocks above the limits."""
        if budget is not None:
            if self._supply is None:
                raise InvalidRequest("this worker shares no budget; start it with --kv-memory-budget")
            self._supply.resize(budget)
        page_bytes = self.paging.page_bytes
        pages = self.free_list.ceiling if ceiling is None else ceiling // page_bytes
        if not 0 < pages <= self.paging.num_pages:
            raise InvalidRequest(
                f"a ceiling of {ceiling} bytes is not between a page, {page_bytes} bytes, and the address range, "
                f"{self.paging.range_bytes} bytes (--kv-cache-memory)"
            )
        lowest = self._floor if floor is None else floor
        if floor is None:
            lowest = min(lowest, pages * page_bytes)
        if not 0 <= lowest <= pages * page_bytes:
            raise InvalidRequest(f"a floor of {lowest} bytes is not between 0 and the ceiling")
        if self._supply is not None:
            self._supply.limit(lowest, pages * page_bytes)
        self._floor = lowest
        self.free_list.limit(pages)

    # -- the work

    async def run(self, on_change: Callable[[], None]) -> None:
        """Runs until cancelled. `on_change` is called when blocks may have become available or must be released."""
        with self._listening():
            self._due.set()
            while True:
                await self._wait()
                await asyncio.sleep(0)  # lets requests run in between
                self._due.clear()
                self._update(on_change)
                while (action := self.free_list.next_action(time.monotonic())) is not None:
                    await self._do(action)
                    if isinstance(action, DiscardPage):
                        self._update(on_change)

    def _update(self, on_change: Callable[[], None]) -> None:
        free_list = self.free_list
        if self._supply is not None:
            if self.references:
                free_list.report_spare_pages(self.references)
            self._supply.refresh()
        waited = free_list.num_wanted_pages
        if not waited and not free_list.is_reclaiming:
            return
        free_list.clear_wanted()
        on_change()
        if waited:
            free_list.report_wanted_pages()  # repeats the report, or withdraws it

    async def _do(self, action: PopulatePage | DiscardPage) -> None:
        doing = asyncio.ensure_future(asyncio.to_thread(self._perform, action))
        try:
            await asyncio.shield(doing)
        finally:  # also when cancelled: the page's state must be right for the next `run`
            await asyncio.wait({doing})
            if isinstance(action, DiscardPage):
                self.num_given_back += 1
                self.free_list.on_discarded(action)
            else:
                self.num_populated += 1

    def _perform(self, action: PopulatePage | DiscardPage) -> None:
        for offset in self.paging.spans(action.page):
            if isinstance(action, DiscardPage):
                self._memory.discard(offset, self.paging.span_bytes)
            else:
                self._memory.populate(offset, self.paging.span_bytes)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s()):
                await self._due.wait()

    def _wait_s(self) -> float | None:
        waits = [] if self._supply is None else [REPORT_S]
        if self.free_list.num_wanted_pages:
            waits.append(POLL_S)
        if (wake_at := self.free_list.wake_at()) is not None:
            waits.append(max(0.0, wake_at - time.monotonic()))
        return min(waits, default=None)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if self._supply is None:
            yield
            return
        loop, bell = asyncio.get_running_loop(), self._supply.bell
        loop.add_reader(bell, self._on_bell)
        try:
            yield
        finally:
            loop.remove_reader(bell)

    def _on_bell(self) -> None:
        assert self._supply is not None, "only a shared supply has a bell"
        self._supply.drain_bell()
        self._due.set()

    def close(self) -> None:
        if self._supply is not None:
            self._supply.close()


class KvMemoryServicer(worker_pb2_grpc.KvMemoryServicer):
    """Serves `KvMemory` and runs the page management. `elastic_memory`: None if the memory is fixed. `on_change`
    notifies the worker's state."""

    def __init__(self, elastic_memory: ElasticMemory | None, on_change: Callable[[], None]) -> None:
        self._elastic_memory = elastic_memory
        self._on_change = on_change

    @contextlib.asynccontextmanager
    async def running_page_management(self, pool: BlockPool) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
        """Runs page management for `pool` while the block lasts; yields its task, or nothing if memory is fixed."""
        if self._elastic_memory is None:
            yield ()
            return
        self._elastic_memory.references = pool.references
        async with background_task(self._elastic_memory.run(self._on_change)) as task:
            yield (task,)

    async def GetLimits(self, request: worker_pb2.GetLimitsRequest, context: Context) -> worker_pb2.KvLimits:
        return self._require().limits()

    async def SetLimits(self, request: worker_pb2.SetLimitsRequest, context: Context) -> worker_pb2.KvLimits:
        """Changes the limits. Raises InvalidRequest for invalid limits, ConfigError for floors above the budget."""
        elastic_memory = self._require()
        elastic_memory.limit(
            floor=request.floor_bytes if request.HasField("floor_bytes") else None,
            ceiling=request.ceiling_bytes if request.HasField("ceiling_bytes") else None,
            budget=request.budget_bytes if request.HasField("budget_bytes") else None,
        )
        self._on_change()
        return elastic_memory.limits()

    def _require(self) -> ElasticMemory:
        if self._elastic_memory is None:
            raise InvalidRequest("this worker's KV memory is fixed; start it with --elastic-kv-memory")
        return self._elastic_memory


_GAUGES = (
    ("ceiling", "May be taken."),
    ("floor", "Can always be had."),
    ("held", "Count as taken."),
    ("resident", "What the machine spends."),
    ("wanted", "What requests wait for."),
)
_COUNTERS = (
    ("populated", "Pages that were there before they were written."),
    ("given_back", "Pages that the machine was given back."),
)


class ElasticMemoryCollector(Collector):
    """Prometheus collector of elastic memory. It runs in the thread of the scrape."""

    def __init__(self, elastic_memory: ElasticMemory) -> None:
        self._elastic_memory = elastic_memory

    def collect(self) -> Iterator[Metric]:
        limits = self._elastic_memory.limits()
        gauges = list(_GAUGES)
        if limits.HasField("budget_bytes"):
            gauges.append(("budget", "Of all workers of the host."))
        for name, text in gauges:
            value = getattr(limits, f"{name}_bytes")
            yield GaugeMetricFamily(f"moonserve_kv_memory_{name}_bytes", text, value=value)
        for name, text in _COUNTERS:
            value = getattr(self._elastic_memory, f"num_{name}")
            yield CounterMetricFamily(f"moonserve_kv_memory_pages_{name}", text, value=value)
