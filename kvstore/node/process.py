"""Starts, runs and stops a store node: memory, disk, listeners, membership, metrics. `kvstore.node.service` has the
RPCs."""

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from moonserve.kvstore.client.node_access.inline_protocol import INLINE_METHOD
from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.disk.health import FULL_ERRORS
from moonserve.kvstore.disk.io.segment_file import replace_durably
from moonserve.kvstore.disk.tier import DiskOptions, SsdTier
from moonserve.kvstore.metrics import StoreCollector
from moonserve.kvstore.node.catch_up import CatchUp
from moonserve.kvstore.node.event_log import EventLog, subscription_messages
from moonserve.kvstore.node.inline_puts import InlinePuts
from moonserve.kvstore.node.inline_server import InlineConnections, InlineServer
from moonserve.kvstore.node.service import StoreService
from moonserve.kvstore.published_index import IndexSegments, KeyIndex
from moonserve.kvstore.state import eviction
from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.catalog_tables import first_generation_of
from moonserve.kvstore.state.state import StoreState
from moonserve.kvstore.wire import STORE_ROLE
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey
from moonserve.protocol.membership.heartbeats import BlockLog, conductor_membership, own_endpoint
from moonserve.protocol.membership.kv_event_publisher import publish
from moonserve.protocol.membership.registry import Member
from moonserve.protocol.membership.registry.client import connect_registry
from moonserve.protocol.membership.registry.lease import (
    Identity,
    RegistryLease,
    load_or_create_identity,
    registry_lease,
)
from moonserve.protocol.pb import common_pb2, conductor_pb2, kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.event_loop import LoopRunner, background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.machine import available_memory_bytes
from moonserve.protocol.process.metrics import add_metrics_service
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.socket_server_connection import ConnectionTakeover
from moonserve.protocol.rpc.wire import endpoint_to_wire
from moonserve.transfer import Segment, TransferEngine
from moonserve.transfer.metrics import engine_with_metrics, rail_totals

log = logging.getLogger(__name__)

_GIB = 2**30
INCARNATION_FILE_NAME = "incarnation"


# Calls in flight when the process stops return within milliseconds, a commit of gigabytes within a second.
STOP_GRACE_S = 1.0


class NodeProcess:
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
        self._is_first_life = generation == first_generation_of(1)
        self._catch_up: CatchUp | None = None
        self._endpoint = own_endpoint(
            config.instance_id,
            rpc_address="",  # known once it listens
            transfer_address=transfer.address,
        )
        self._block_log = BlockLog(self._inventory)
        events = self._events = EventLog(self._block_log if config.conductor else None)
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
        server.add_socket_service("KvStore", self._service)
        add_metrics_service(
            server.grpc,
            self._config.instance_id,
            self._registry,
            lambda: rail_totals(self._transfer.stats),
        )
        inline = self._inline_connections()
        if inline is not None:
            server.add_takeover(ConnectionTakeover(INLINE_METHOD, inline.admit, inline.take_over))
        await self._service.removal_store.load(is_first_life=self._is_first_life)
        if self._config.join is not None:
            self._catch_up = CatchUp(
                self._config.instance_id,
                connect_registry(
                    self._config.join,
                    cluster_token=self._config.cluster_token,
                    tls=self._config.tls(),
                ),
                self._service.removal_store,
                self._state,
                Channels(self._config.cluster_token, self._config.tls()),
            )
        await self._open_disk(lifecycle)
        address = await server.start(self._config.host, self._config.port)
        self._service.lean_address = server.lean_address
        self._service.lean_unix_address = server.lean_unix_address
        try:
            async with (
                self._recovering(lifecycle),
                self._member(address) as watched,
                background_task(self._publish()) as publishing,
            ):
                lifecycle.ready(rpc=address, transfer=self._endpoint.transfer_address)
                await lifecycle.wait_for_stop(publishing, *watched)
        finally:
            self._service.end_streams()
            await server.stop(STOP_GRACE_S)
            if inline is not None:
                await asyncio.to_thread(inline.close)
            await self._service.close()

    def _inline_connections(self) -> InlineConnections | None:
        """Returns the inline connections: threads that serve the same memory and ask this loop for reservations."""
        if not offers_inline(self._config):
            return None
        storing = InlinePuts(self._segment, self._service.local_writes, LoopRunner(asyncio.get_running_loop()))
        return InlineConnections(InlineServer(self._index, self._segment, storing).serve)

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
            ),
            moved=self._state.tier_moves.relocated,
            health_changed=mover.health_changed,
        )
        mover.set_disk(disk)
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

        async with background_task(mover.recover(mover.disk, progress, self._catch_up)) as task:
            task.add_done_callback(_log_failure)
            yield

    @contextlib.asynccontextmanager
    async def _member(self, address: str) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
        """Joins the conductor's cluster, the registry's, or none. Yields the tasks that end when it is refused."""
        endpoint = dataclasses.replace(self._endpoint, rpc_address=address)
        if self._config.join is not None:
            async with self._registered(endpoint) as tasks:
                yield tasks
            return
        registration = conductor_pb2.RegisterRequest(endpoint=endpoint_to_wire(endpoint), role=common_pb2.ROLE_STORE)
        async with conductor_membership(self._config, registration, self._service.load, self._block_log) as lease:
            yield lease.watched

    @contextlib.asynccontextmanager
    async def _registered(self, endpoint: Endpoint) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
        catching_up = self._catch_up
        assert catching_up is not None
        ssd = self._config.ssd_folder()
        identity = load_or_create_identity(ssd[0] if ssd else None, self._config.instance_id)
        me = Member(
            endpoint=dataclasses.replace(endpoint, epoch=identity.last_epoch),
            role=STORE_ROLE,
            owner=identity.owner,
            facts={"dram": str(self._config.dram), "ssd": self._config.ssd or ""},
        )
        try:
            lease = RegistryLease(
                catching_up.registry,
                me,
                on_epoch=lambda joined: _save_epoch(identity, joined),
                before_rejoin=catching_up.before_rejoin,
            )
            async with background_task(catching_up.run(lease)) as hearing, registry_lease(lease) as task:
                yield task, hearing
        finally:
            await catching_up.close()

    async def _publish(self) -> None:
        """Publishes KV events, or waits until cancelled."""
        if self._config.kv_events is None:
            await asyncio.get_running_loop().create_future()
        else:
            messages = subscription_messages(self._events, self._state, 0, kvstore_pb2.StoreSubscribeRequest())
            await publish(self._config.kv_events, self._config.kv_events_replay, messages, self._inventory)

    def _inventory(self) -> list[tuple[BlockKey, BlockKey]]:
        return [(stored.key, stored.parent or NO_PARENT) for stored in self._state.catalog.objects()]


def _save_epoch(identity: Identity, joined: Member) -> None:
    try:
        identity.with_epoch(joined.endpoint.epoch)
    except OSError as error:
        log.warning("the epoch cannot be saved: %s", error)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("reading the disk's index failed", exc_info=task.exception())


def first_generation(folder: Path | None) -> int:
    """Counts a new start of the folder's node and returns its first generation. Blocks. Raises ConfigError.

    The high bits of a generation count the starts. The count is on disk before it is used, so that generations never
    repeat and grow over restarts, whatever the clock does.
    """
    if folder is None:
        return first_generation_of(1)
    path = folder / INCARNATION_FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        incarnation = int(path.read_text()) + 1 if path.exists() else 1
        _write_count(path, str(incarnation))
    except OSError as error:
        raise ConfigError(f"cannot use {folder} for objects: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged; delete the folder {folder}, whose objects cannot be told from newer ones"
        ) from error
    return first_generation_of(incarnation)


def _write_count(path: Path, text: str) -> None:
    """Replaces the file. On a full disk, overwrites it in place: a few bytes in one existing block, which disks write
    atomically."""
    try:
        replace_durably(path, text)
    except OSError as error:
        if error.errno not in FULL_ERRORS or not path.exists():
            raise
        with path.open("r+") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def offers_inline(config: StoreConfig) -> bool:
    """Returns True if inline connections are allowed: tcp is enabled, no TLS is configured, no rails are named."""
    secret = config.tls_files() is not None or config.transfer_tls_files() is not None
    return "tcp" in config.transports and not secret and not config.transfer_rails


async def serve(config: StoreConfig, lifecycle: Lifecycle) -> None:
    """Runs a store node until the process is stopped. Raises ConfigError if it cannot start."""
    ssd = config.ssd_folder()
    generation = await asyncio.to_thread(first_generation, ssd[0] if ssd else None)
    with engine_with_metrics(config) as (transfer, registry):
        lifecycle.progress("allocating memory")
        segment = await asyncio.to_thread(_allocate, transfer, config.dram)
        await NodeProcess(config, transfer, segment, registry, generation).run(lifecycle)


def _allocate(transfer: TransferEngine, nbytes: int) -> Segment:
    available = available_memory_bytes()
    if available is not None and nbytes > available:
        raise ConfigError(
            f"--dram {nbytes / _GIB:.1f} GiB is more than this machine has left: {available / _GIB:.1f} GiB"
        )
    try:
        return transfer.allocate(nbytes, readable=True, name="objects")
    except (OSError, MemoryError) as error:
        raise ConfigError(f"--dram {nbytes}: {error}; choose less") from error
