"""Starts, runs and stops a store node: memory, disk, listeners, membership, metrics. `kvstore.service` has the RPCs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvstore import eviction
from kvstore.catalog import Catalog
from kvstore.catching_up import CatchingUp
from kvstore.config import StoreConfig
from kvstore.disk.tier import DiskOptions, SsdTier
from kvstore.event_log import EventLog
from kvstore.express.frames import METHOD
from kvstore.express.service import ExpressConnections, ExpressService
from kvstore.express.storing import Storing
from kvstore.generations import first_generation, first_of
from kvstore.index_segment import IndexSegments
from kvstore.metrics import StoreCollector
from kvstore.native.metadata import KeyIndex
from kvstore.service import StoreService
from kvstore.state import StoreState
from protocol.errors import ConfigError
from protocol.in_loop import InLoop
from protocol.keys import NO_PARENT, BlockKey
from protocol.lean.served import HandOver
from protocol.membership import BlockLog, member, own_endpoint
from protocol.metrics import exposed
from protocol.pb import common_pb2, conductor_pb2, kvstore_pb2_grpc
from protocol.process import Lifecycle, running
from protocol.registry.base import Member
from protocol.registry.connect import connect
from protocol.registry.identity import Identity, load_or_create
from protocol.registry.seat import Seat, seated
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from protocol.scraping import process_registry, serve_metrics
from protocol.wire import endpoint_to_wire
from transfer import Segment, TransferEngine
from transfer.metrics import TransferCollector, rail_totals

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_COUNTED = ("MemAvailable:", "SwapFree:")


def available_bytes(meminfo: Path = MEMINFO, cgroup_limit: Path = CGROUP_LIMIT) -> int | None:
    """Returns the bytes a process can still allocate by the kernel and the control group's limit; None if unknown."""
    lines = [line.split() for line in _text(meminfo).splitlines()]
    kib = [int(line[1]) for line in lines if line[:1] and line[0] in _COUNTED]
    limit = _text(cgroup_limit).strip()
    told = [sum(kib) << 10] if kib else []
    return min([*told, *([int(limit)] if limit.isdigit() else [])], default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


log = logging.getLogger(__name__)

_GIB = 2**30

# Calls in flight when the process stops return within milliseconds, a commit of gigabytes within a second.
STOP_GRACE_S = 1.0


class StoreNode:
    """One store node over an allocated segment."""

    def __init__(
        self,
        config: StoreConfig,
        transfer: TransferEngine,
        segment: Segment,
        registry: CollectorRegistry,
        generation: int,
    ) -> None:
        self._config = config
        self._registry = registry
        self._transfer = transfer
        self._is_first_life = generation == first_of(1)
        self._catching_up: CatchingUp | None = None
        self._endpoint = own_endpoint(
            config.instance_id,
            rpc_address="",  # known once it listens
            transfer_address=transfer.address,
        )
        self._block_log = BlockLog(self._inventory)
        events = EventLog(self._block_log if config.conductor else None)
        segments = IndexSegments(transfer)
        self._segment = segment
        self._index = KeyIndex(segments.allocate, segments.retire)
        catalog = Catalog(
            segment.nbytes,
            index=self._index,
            policies=lambda: eviction.make(config.eviction_policy),
            announce=events,
            watermarks=config.watermarks(),
            quotas=config.quotas(),
            first_generation=generation,
        )
        self._state = StoreState(catalog)
        self._service = StoreService(config, transfer, segment, self._endpoint, self._state, segments, events)
        disk_state = self._service.mover.disk_state
        registry.register(StoreCollector(catalog.usage, catalog.counters, disk_state))

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until the lifecycle stops it. Raises ConfigError if the port is taken, or the error that ended the
        membership."""
        server = RpcServer(self._config.cluster_token, self._config.tls())
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self._service, server.grpc)
        server.add_lean("KvStore", self._service)
        serve_metrics(
            server.grpc,
            self._config.instance_id,
            self._registry,
            lambda: rail_totals(self._transfer.stats),
        )
        express = self._express()
        if express is not None:
            server.add_hand_over(HandOver(METHOD, express.admit, express.take))
        await self._service.remembering.load(is_first_life=self._is_first_life)
        if self._config.join is not None:
            self._catching_up = CatchingUp(
                self._config.instance_id,
                connect(
                    self._config.join,
                    cluster_token=self._config.cluster_token,
                    tls=self._config.tls(),
                ),
                self._service.remembering,
                self._state,
                Channels(self._config.cluster_token, self._config.tls()),
            )
        await self._open_disk(lifecycle)
        address = await server.start(self._config.host, self._config.port)
        self._service.lean_address = server.lean_address
        self._service.lean_unix_address = server.lean_unix_address
        try:
            async with self._recovering(lifecycle), self._member(address) as watched:
                lifecycle.ready(rpc=address, transfer=self._endpoint.transfer_address)
                await lifecycle.until_stopped(*watched)
        finally:
            self._service.end_streams()
            await server.stop(STOP_GRACE_S)
            if express is not None:
                await asyncio.to_thread(express.close)
            await self._service.close()

    def _express(self) -> ExpressConnections | None:
        """Returns the express connections: threads that serve the same memory and ask this loop for reservations."""
        if not offers_express(self._config):
            return None
        storing = Storing(self._segment, self._service.writes, InLoop(asyncio.get_running_loop()))
        return ExpressConnections(ExpressService(self._index, self._segment, storing).serve)

    async def _open_disk(self, lifecycle: Lifecycle) -> None:
        ssd = self._config.ssd_folder()
        if ssd is None:
            return
        lifecycle.progress("opening the disk")
        folder, capacity = ssd
        key_file = self._config.ssd_key_file
        mover = self._service.mover
        disk = await SsdTier.open(
            folder,
            capacity,
            DiskOptions(
                key_file=Path(key_file) if key_file else None,
                sync_interval_s=self._config.ssd_sync_interval_s,
                memory=self._segment.buffer,
            ),
            moved=self._state.moves.relocated,
            health_changed=mover.health_changed,
        )
        mover.expect(disk)
        self._state.catalog.use_disk(disk)

    @contextlib.asynccontextmanager
    async def _recovering(self, lifecycle: Lifecycle) -> AsyncIterator[None]:
        """Recovers the disk's objects while the node serves; each object is available as soon as it is found."""
        mover = self._service.mover
        if mover.disk is None:
            yield
            return

        def progress(share: float) -> None:
            lifecycle.progress("reading the disk's index", share)

        async with running(mover.recover(mover.disk, progress, self._catching_up)) as task:
            task.add_done_callback(_report)
            yield

    @contextlib.asynccontextmanager
    async def _member(self, address: str) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
        """Joins the conductor's cluster, the registry's, or none. Yields the tasks that end when it is refused."""
        endpoint = dataclasses.replace(self._endpoint, rpc_address=address)
        if self._config.join is not None:
            async with self._seated(endpoint) as tasks:
                yield tasks
            return
        registration = conductor_pb2.RegisterRequest(endpoint=endpoint_to_wire(endpoint), role=common_pb2.ROLE_STORE)
        async with member(self._config, registration, self._service.load, self._block_log) as seat:
            yield seat.watched

    @contextlib.asynccontextmanager
    async def _seated(self, endpoint: Endpoint) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
        catching_up = self._catching_up
        assert catching_up is not None
        ssd = self._config.ssd_folder()
        identity = load_or_create(ssd[0] if ssd else None, self._config.instance_id)
        me = Member(
            endpoint=dataclasses.replace(endpoint, epoch=identity.last_epoch),
            role="store",
            owner=identity.owner,
            facts={"dram": str(self._config.dram), "ssd": self._config.ssd or ""},
        )
        try:
            seat = Seat(
                catching_up.registry,
                me,
                on_epoch=lambda joined: _remember(identity, joined),
                before_rejoin=catching_up.before_rejoin,
            )
            async with running(catching_up.run(seat)) as hearing, seated(seat) as task:
                yield task, hearing
        finally:
            await catching_up.close()

    def _inventory(self) -> list[tuple[BlockKey, BlockKey]]:
        return [(stored.key, stored.parent or NO_PARENT) for stored in self._state.catalog.objects()]


def _remember(identity: Identity, joined: Member) -> None:
    try:
        identity.with_epoch(joined.endpoint.epoch)
    except OSError as error:
        log.warning("the epoch could not be kept: %s", error)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("reading the disk's index failed", exc_info=task.exception())


def offers_express(config: StoreConfig) -> bool:
    """Returns True if express connections are allowed: tcp is enabled, no TLS is configured, no rails are named."""
    secret = config.tls_files() is not None or config.transfer_tls_files() is not None
    return "tcp" in config.transports and not secret and not config.transfer_rails


async def serve(config: StoreConfig, lifecycle: Lifecycle) -> None:
    """Runs a store node until the process is stopped. Raises ConfigError if it cannot start."""
    registry = process_registry()
    ssd = config.ssd_folder()
    generation = await asyncio.to_thread(first_generation, ssd[0] if ssd else None)
    transfer = TransferEngine(
        cluster_token=config.cluster_token,
        name=config.instance_id,
        options=config.transfer_options(config.host),
    )
    registry.register(TransferCollector(transfer))
    with transfer, exposed(registry, config.host, config.metrics_port):
        lifecycle.progress("allocating memory")
        segment = await asyncio.to_thread(_allocate, transfer, config.dram)
        await StoreNode(config, transfer, segment, registry, generation).run(lifecycle)


def _allocate(transfer: TransferEngine, nbytes: int) -> Segment:
    available = available_bytes()
    if available is not None and nbytes > available:
        raise ConfigError(
            f"--dram {nbytes / _GIB:.1f} GiB is more than this machine has left: {available / _GIB:.1f} GiB"
        )
    try:
        return transfer.allocate(nbytes, readable=True, name="objects")
    except (OSError, MemoryError) as error:
        raise ConfigError(f"--dram {nbytes}: {error}; choose less") from error
