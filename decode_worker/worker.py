"""A decode worker from start to stop: model, memory, listener, membership, drain.

Decides nothing about requests; that is `decode_worker.state`, and `decode_worker.service` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from decode_worker import events
from decode_worker.config import DecodeConfig, PoolPlan, plan_pool
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone, WorkerServicer
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from engine.config import ModelConfig, load_model_config
from engine.hub import resolve_model
from protocol.errors import ConfigError
from protocol.keys import BlockKey
from protocol.membership import BlockLog, Membership
from protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from protocol.process import Lifecycle, host_identity
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from protocol.wire import endpoint_to_wire, layout_to_wire
from transfer import Segment, TransferEngine

if TYPE_CHECKING:
    from engine.engine import Engine

Profiles = tuple[conductor_pb2.PrefillProfile, conductor_pb2.DecodeProfile]

log = logging.getLogger(__name__)

# The last tokens and failures are on their way to gateways within milliseconds.
STOP_GRACE_S = 0.5


class BlockNews:
    """Tells the conductor which blocks can be found here, once there is a membership to do so."""

    def __init__(self) -> None:
        self.log = BlockLog()
        self.wake: Callable[[], None] | None = None

    def added(self, key: BlockKey, parent: BlockKey) -> None:
        self.log.added(key, parent)
        self._tell()

    def removed(self, key: BlockKey) -> None:
        self.log.removed(key)
        self._tell()

    def _tell(self) -> None:
        if self.wake is not None:
            self.wake()


class DecodeWorker:
    """One worker over a loaded engine. Its epoch is the time of its start, so that it grows."""

    def __init__(
        self,
        config: DecodeConfig,
        plan: PoolPlan,
        engine: Engine,
        profiles: Profiles,
        transfer: TransferEngine,
        segment: Segment,
    ) -> None:
        # Here and in the functions below, so that a wrong flag is told before torch is imported.
        from engine.runtime import EngineThread

        self._config = config
        self._plan = plan
        self._news = BlockNews()
        self._thread = EngineThread(engine)
        self._endpoint = Endpoint(
            instance_id=config.instance_id,
            epoch=time.time_ns(),
            rpc_address="",  # known once it listens
            transfer_address=transfer.address,
            host=host_identity(),
        )
        self._zone = LandingZone(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            num_blocks=plan.num_blocks,
            block_size=plan.layout.block_size,
            fingerprint=engine.fingerprint,
        )
        pool = BlockPool(
            plan.num_blocks,
            on_added=self._news.added,
            on_removed=self._news.removed,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        state = DecodeState(pool, plan.limits)
        self.service = DecodeService(state, self._thread, transfer, segment, plan.layout)
        self._profiles = profiles
        self._membership: Membership | None = None

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until told to stop. Raises ConfigError when the port is taken, or what ended the membership."""
        server = RpcServer(self._config.cluster_token)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self.service), server.grpc)
        landing = LandingServicer(self.service, self._zone)
        worker_pb2_grpc.add_LandingServicer_to_server(landing, server.grpc)
        ended = asyncio.Event()
        work = asyncio.create_task(self.service.run(ended))
        try:
            address = await self._listen(server)
            async with self._member(address) as membership:
                lifecycle.ready(rpc=address, transfer=self._endpoint.transfer_address)
                await _first_end(lifecycle.stopping, work, membership)
                await self._drain()
        finally:
            ended.set()
            await asyncio.wait({work})
            await server.stop(STOP_GRACE_S)
            self.service.streams.close()
            self._thread.close()
        work.result()

    async def _listen(self, server: RpcServer) -> str:
        try:
            address = await server.start(self._config.host, self._config.port)
        except OSError as error:
            raise ConfigError(f"{error}; choose another --port") from error
        self._endpoint = dataclasses.replace(self._endpoint, rpc_address=address)
        return address

    async def _drain(self) -> None:
        """Takes nothing new and lets what runs finish, for as long as the configuration allows."""
        if self._membership is not None:
            self._membership.draining = True
            self._membership.wake()
        self.service.handle(events.DrainStarted())
        try:
            await asyncio.wait_for(self.service.idle.wait(), self._config.drain_timeout_s)
        except TimeoutError:
            log.warning("stopping with requests under way")

    @contextlib.asynccontextmanager
    async def _member(self, address: str) -> AsyncIterator[asyncio.Task[None] | None]:
        """Keeps the worker registered with its conductor, if it has one; gives the task that does."""
        if self._config.conductor is None:
            yield None
            return
        channels = Channels(self._config.cluster_token)
        self._membership = membership = Membership(
            channels,
            self._config.conductor,
            self._registration(),
            self.service.load,
            self._news.log,
        )
        self._news.wake = membership.wake
        task = asyncio.create_task(membership.run())
        try:
            yield task
            await membership.leave()
        finally:
            self._news.wake = None
            task.cancel()
            await asyncio.wait({task})
            await channels.close()

    def _registration(self) -> conductor_pb2.RegisterRequest:
        prefill, decode = self._profiles
        return conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(self._endpoint),
            role=common_pb2.ROLE_DECODE,
            layout=layout_to_wire(self._plan.layout),
            fingerprint=self._zone.fingerprint,
            num_blocks=self._plan.num_blocks,
            max_num_seqs=self._plan.limits.max_num_seqs,
            max_model_len=self._plan.limits.max_model_len,
            prefill_profile=prefill,
            decode_profile=decode,
        )


async def serve(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Runs a decode worker until the process is told to stop. Raises ConfigError when it cannot start."""
    lifecycle.progress("reading configuration")
    path = await asyncio.to_thread(resolve_model, config.model)
    model = load_model_config(path)
    plan = plan_pool(config, model)
    transfer = TransferEngine(
        cluster_token=config.cluster_token, host=config.host, transports=config.transports
    )
    with transfer:
        lifecycle.progress("allocating memory")
        segment = await asyncio.to_thread(_allocate, transfer, plan)
        engine = await asyncio.to_thread(_load, path, model, config, plan, segment, lifecycle)
        lifecycle.progress("measuring")
        profiles = await asyncio.to_thread(_measure, engine, config)
        worker = DecodeWorker(config, plan, engine, profiles, transfer, segment)
        await worker.run(lifecycle)


def _allocate(transfer: TransferEngine, plan: PoolPlan) -> Segment:
    nbytes = plan.layout.pool_bytes(plan.num_blocks)
    try:
        return transfer.allocate(nbytes)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"{nbytes} bytes of KV: {error}; lower --kv-cache-memory") from error


def _load(
    path: Path,
    model: ModelConfig,
    config: DecodeConfig,
    plan: PoolPlan,
    segment: Segment,
    lifecycle: Lifecycle,
) -> Engine:
    from engine.engine import Engine

    return Engine.load(
        path,
        config=model,
        layout=plan.layout,
        num_blocks=plan.num_blocks,
        memory=segment.buffer,
        num_threads=config.num_threads,
        load_format=config.load_format,
        progress=lifecycle.progress,
    )


def _measure(engine: Engine, config: DecodeConfig) -> Profiles:
    """How fast this engine is, for the conductor's predictions. Overwrites the pool."""
    from engine.profile import measure_cached, profile_folder

    kept_in = config.profile_dir
    folder = Path(kept_in) if kept_in else profile_folder(os.environ, Path.home())
    return measure_cached(engine, folder)


async def _first_end(
    stopping: asyncio.Event, work: asyncio.Task[None], membership: asyncio.Task[None] | None
) -> None:
    """Returns when told to stop; raises what ended one of the tasks before that."""
    told = asyncio.create_task(stopping.wait())
    tasks: set[asyncio.Task[None]] = {work} if membership is None else {work, membership}
    try:
        await asyncio.wait({told, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        told.cancel()
