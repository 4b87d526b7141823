"""A prefill worker from start to stop: model, memory, listener, membership, drain.

Decides nothing about requests; that is `prefill_worker.state`, and `prefill_worker.service` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig, load_model_config
from engine.hub import resolve_model
from kvstore.block_client import BlockClient
from prefill_worker.config import PoolPlan, PrefillConfig, plan_pool
from prefill_worker.landing import KvMemory
from prefill_worker.landing_client import LandingClient
from prefill_worker.service import PrefillService
from prefill_worker.servicer import WorkerServicer
from prefill_worker.state import PrefillState
from prefill_worker.stores import HomeFinder
from protocol.errors import ConfigError
from protocol.ids import new_id
from protocol.membership import BlockLog, Membership
from protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from protocol.process import Lifecycle, host_identity
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from protocol.wire import endpoint_to_wire, layout_to_wire
from transfer import Segment, TransferEngine

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

# The last tokens and failures are on their way to gateways within milliseconds.
STOP_GRACE_S = 0.5

Profiles = tuple[conductor_pb2.PrefillProfile, conductor_pb2.DecodeProfile]


class Wakers:
    """Whom to tell when something changes; they exist only while the worker is a member of a cluster."""

    def __init__(self, blocks: BlockLog) -> None:
        self._blocks = blocks
        self.changed: Callable[[], None] | None = None
        self.home_wanted: Callable[[], None] | None = None

    def wake(self) -> None:
        """Load travels with the next heartbeat; blocks are worth one of their own."""
        if self.changed is not None and self._blocks.has_changes:
            self.changed()

    def look_for_home(self) -> None:
        if self.home_wanted is not None:
            self.home_wanted()


class PrefillWorker:
    """One worker over a loaded engine. Its epoch is the time of its start, so that it grows."""

    def __init__(
        self,
        config: PrefillConfig,
        plan: PoolPlan,
        engine: Engine,
        transfer: TransferEngine,
        segment: Segment,
    ) -> None:
        # Here and below, so that a wrong flag is told before torch is imported.
        from engine.runtime import EngineThread

        self._config = config
        self._plan = plan
        self._transfer_address = transfer.address
        self._fingerprint = engine.fingerprint
        self._channels = Channels(config.cluster_token)
        self._thread = EngineThread(engine)
        self._blocks = BlockLog()
        self._wakers = Wakers(self._blocks)
        self._profiles: Profiles | None = None
        self._membership: Membership | None = None  # while it runs, if there is a conductor
        state = PrefillState(
            plan.limits,
            lease_prefix=new_id(config.instance_id),
            home_store=config.home_store,
            on_added=self._blocks.added,
            on_removed=self._blocks.removed,
        )
        self.service = PrefillService(
            state,
            engine=self._thread,
            memory=KvMemory(segment, plan.layout, plan.limits.num_blocks),
            transfer=transfer,
            landings=LandingClient(
                self._channels, fingerprint=engine.fingerprint, ttl_s=config.landing_ttl_s
            ),
            stores=BlockClient(self._channels, transfer),
            landing_ttl_s=config.landing_ttl_s,
            wake=self._wakers.wake,
            look_for_home=self._wakers.look_for_home,
        )
        self._servicer = WorkerServicer(
            self.service, block_size=plan.layout.block_size, vocab_size=engine.config.vocab_size
        )

    async def measure(self, engine: Engine) -> None:
        """How fast this engine is, for the conductor's predictions. Overwrites the pool: do it first."""
        from engine.profile import measure_cached, profile_folder

        kept_in = self._config.profile_dir
        folder = Path(kept_in) if kept_in else profile_folder(os.environ, Path.home())

        def work() -> None:
            self._profiles = measure_cached(engine, folder)

        await self._thread.run(work)

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until told to stop. Raises ConfigError when the port is taken, or what made going on pointless."""
        server = RpcServer(self._config.cluster_token)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._servicer, server.grpc)
        try:
            address = await self._listen(server)
            async with self._member(address) as membership:
                lifecycle.ready(rpc=address, transfer=self._transfer_address)
                await _first_end(lifecycle.stopping, [self.service.failed, *membership])
                await self._drain()
        finally:
            await server.stop(STOP_GRACE_S)
            await self.service.stop()
            await self._channels.close()
            self._thread.close()

    async def _listen(self, server: RpcServer) -> str:
        try:
            return await server.start(self._config.host, self._config.port)
        except OSError as error:
            raise ConfigError(f"{error}; choose another --port") from error

    async def _drain(self) -> None:
        """Takes nothing new and lets what is here finish, for as long as the configuration allows."""
        self._servicer.draining = True
        if self._membership is not None:
            self._membership.draining = True
            self._membership.wake()
        try:
            await asyncio.wait_for(self.service.drained(), self._config.drain_timeout_s)
        except TimeoutError:
            log.warning("stopping with requests under way")

    @contextlib.asynccontextmanager
    async def _member(self, address: str) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Keeps the worker registered with its conductor, if it has one; gives the tasks that do."""
        if self._config.conductor is None:
            yield []
            return
        self._membership = membership = Membership(
            self._channels,
            self._config.conductor,
            self._registration(address),
            self.service.load,
            self._blocks,
        )
        self._wakers.changed = membership.wake
        tasks = [asyncio.create_task(membership.run()), *self._find_home(self._config.conductor)]
        try:
            yield tasks
            await membership.leave()
        finally:
            self._wakers.changed = self._wakers.home_wanted = None
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _find_home(self, conductor: str) -> list[asyncio.Task[None]]:
        if self._config.home_store is None:
            return []
        finder = HomeFinder(
            self._channels, conductor, self._config.home_store, self.service.home_found
        )
        self._wakers.home_wanted = finder.look
        return [asyncio.create_task(finder.run())]

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        endpoint = Endpoint(
            instance_id=self._config.instance_id,
            epoch=time.time_ns(),
            rpc_address=address,
            transfer_address=self._transfer_address,
            host=host_identity(),
        )
        registration = conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(endpoint),
            role=common_pb2.ROLE_PREFILL,
            layout=layout_to_wire(self._plan.layout),
            fingerprint=self._fingerprint,
            num_blocks=self._plan.limits.num_blocks,
            home_store=self._config.home_store or "",
            max_num_seqs=self._plan.limits.max_num_seqs,
            max_model_len=self._plan.limits.max_model_len,
        )
        if self._profiles is not None:
            prefill, decode = self._profiles
            registration.prefill_profile.CopyFrom(prefill)
            registration.decode_profile.CopyFrom(decode)
        return registration


async def serve(config: PrefillConfig, lifecycle: Lifecycle) -> None:
    """Runs a prefill worker until the process is told to stop. Raises ConfigError when it cannot start."""
    lifecycle.progress("reading configuration")
    path = await asyncio.to_thread(resolve_model, config.model)
    model = load_model_config(path)
    plan = plan_pool(config, model)
    transfer = TransferEngine(
        cluster_token=config.cluster_token,
        host=config.host,
        transports=config.transports,
        faults=config.faults(),
    )
    with transfer:
        lifecycle.progress("allocating memory")
        segment = await asyncio.to_thread(_allocate, transfer, plan)
        engine = await asyncio.to_thread(_load, path, model, config, plan, segment, lifecycle)
        worker = PrefillWorker(config, plan, engine, transfer, segment)
        lifecycle.progress("measuring")
        await worker.measure(engine)
        await worker.run(lifecycle)


def _allocate(transfer: TransferEngine, plan: PoolPlan) -> Segment:
    nbytes = plan.layout.pool_bytes(plan.limits.num_blocks)
    try:
        return transfer.allocate(nbytes)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"{nbytes} bytes of KV: {error}; lower --kv-cache-memory") from error


def _load(
    path: Path,
    model: ModelConfig,
    config: PrefillConfig,
    plan: PoolPlan,
    segment: Segment,
    lifecycle: Lifecycle,
) -> Engine:
    from engine.engine import Engine

    return Engine.load(
        path,
        config=model,
        layout=plan.layout,
        num_blocks=plan.limits.num_blocks,
        memory=segment.buffer,
        num_threads=config.num_threads,
        load_format=config.load_format,
        progress=lifecycle.progress,
    )


async def _first_end(stopping: asyncio.Event, watched: Sequence[asyncio.Future[None]]) -> None:
    """Returns when told to stop; raises what ended one of the others before that."""
    told = asyncio.create_task(stopping.wait())
    futures: set[asyncio.Future[Any]] = {told, *watched}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in watched:
            if future.done():
                future.result()
    finally:
        told.cancel()
