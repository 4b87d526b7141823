"""Assembly of a worker process whose engine is vLLM, of either role: engine, server, membership, drain.

Decides nothing about requests: `state` does, and `service` performs its decisions. vLLM is imported only where its
engine starts in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import tempfile
from functools import partial
from pathlib import Path

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import root_key
from moonserve.protocol.membership.heartbeats import (
    BlockLog,
    MembershipHandle,
    conductor_membership,
    own_endpoint,
)
from moonserve.protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.metrics import add_metrics_service, http_endpoint, process_registry
from moonserve.protocol.process.tracing import Tracer, tracing
from moonserve.protocol.request import Role
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.wire import endpoint_to_wire, role_to_wire, to_message
from moonserve.vllm.serving.config import EngineWorkerConfig, VllmConfig
from moonserve.vllm.serving.kv_event_state import CachedBlocks
from moonserve.vllm.serving.service import Engine, HandoffServicer, VllmService
from moonserve.vllm.serving.speed_profile import measure
from moonserve.worker.draining import Drain, DrainingServicer
from moonserve.worker.metrics import registered_collectors, worker_collector
from moonserve.worker.service import PrefillServicer, WorkerServicer

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.5  # for the last events to reach the gateways; `worker.process` has the same, and imports torch
Profiles = tuple[conductor_pb2.PrefillProfile, conductor_pb2.DecodeProfile]


async def serve_prefill(config: VllmConfig, lifecycle: Lifecycle) -> None:
    """Runs a prefill worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    await _serve(config, Role.PREFILL, lifecycle)


async def serve_decode(config: VllmConfig, lifecycle: Lifecycle) -> None:
    """Runs a decode worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    await _serve(config, Role.DECODE, lifecycle)


async def _serve(config: VllmConfig, role: Role, lifecycle: Lifecycle) -> None:
    from vllm.platforms import current_platform

    from moonserve.vllm.serving.engine import running_engine

    lifecycle.progress("loading into vLLM")
    # vLLM's newer model runner, its default on GPUs, takes no logits processors of the usual interface.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    draws = config.seeded_draws
    exact = current_platform.is_cpu() if draws == "auto" else draws == "exact"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonserve-vllm-")))
        args = config.engine_args(folder)
        tracer = stack.enter_context(tracing(config, config.instance_id, role.value))
        try:
            engine = stack.enter_context(running_engine(args, exact_draws=exact))
        except (ValueError, RuntimeError) as error:  # vLLM's own errors about models and memory
            raise ConfigError(f"vLLM did not start: {error}") from error
        lifecycle.progress("measuring")
        profiles = await measure(engine)
        await serve_engine(config, role, engine, profiles, lifecycle, tracer)
    gc.freeze()  # otherwise the interpreter, when it ends, collects vLLM's and torch's objects for seconds


async def serve_engine(
    config: EngineWorkerConfig, role: Role, engine: Engine, profiles: Profiles, lifecycle: Lifecycle, tracer: Tracer
) -> None:
    """Runs a worker on a started engine until the process is requested to stop. Raises NoWorker if the engine dies."""
    channels = Channels(config.cluster_token, config.tls())
    service = VllmService(engine, role, channels, engine.facts.fingerprint, tracer=tracer)
    try:
        await _Worker(config, role, engine, service, profiles).run(lifecycle)
    finally:
        await channels.close()


class _Worker:
    """One worker on a started engine."""

    def __init__(
        self, config: EngineWorkerConfig, role: Role, engine: Engine, service: VllmService, profiles: Profiles
    ) -> None:
        self._config = config
        self._role = role
        self._engine = engine
        self._service = service
        self._profiles = profiles
        self._blocks = BlockLog()
        self._cached = CachedBlocks(
            root_key(service.fingerprint), engine.facts.block_size, self._blocks.added, self._blocks.removed
        )
        self._drain = Drain(lambda: service.is_idle)

    async def run(self, lifecycle: Lifecycle) -> None:
        config, service = self._config, self._service
        registry = process_registry()
        server = RpcServer(config.cluster_token, config.tls())
        servicer = self._servicer()
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        server.add_socket_service("Worker", servicer)
        if self._role is Role.DECODE:
            handoff = HandoffServicer(service)
            worker_pb2_grpc.add_EngineHandoffServicer_to_server(handoff, server.grpc)
            server.add_socket_service("EngineHandoff", handoff)
        worker_pb2_grpc.add_DrainingServicer_to_server(DrainingServicer(self._drain), server.grpc)
        add_metrics_service(server.grpc, config.instance_id, registry)
        figures = worker_collector(self._role, service.status, lambda: self._drain.is_draining)
        try:
            address = await server.start(config.host, config.port)
            with (
                registered_collectors(registry, figures),
                http_endpoint(registry, config.host, config.metrics_port),
            ):
                await self._serve_as_member(address, lifecycle)
        finally:
            await service.finish()
            service.streams.finish()
            await server.stop(STOP_GRACE_S)
            await service.stop()

    async def _serve_as_member(self, address: str, lifecycle: Lifecycle) -> None:
        registration = self._registration(address)
        async with (
            conductor_membership(self._config, registration, self._service.load, self._blocks) as membership,
            background_task(self._engine.died()) as died,
            background_task(self._follow_cache()) as following,
        ):
            lifecycle.ready(rpc=address)
            with self._drain.commands_enabled(partial(self._set_draining, membership)):
                await lifecycle.wait_for_stop(self._service.failed, died, following, *membership.watched)
                self._drain.start_shutdown()
                timeout_s = self._config.drain_timeout_s
                if not await lifecycle.wait_until_drained(self._service.drained(), timeout_s):
                    log.warning("stopping while requests are in flight")

    async def _follow_cache(self) -> None:
        """Tells the conductor which blocks vLLM's prefix cache has."""
        if self._engine.kv_events is None:
            await asyncio.get_running_loop().create_future()  # until cancelled
        else:
            from moonserve.vllm.serving.kv_event_stream import follow_events  # needs the extra `kv-events`

            await follow_events(self._engine.kv_events, self._cached)

    def _set_draining(self, membership: MembershipHandle, draining: bool) -> None:
        membership.drain(draining)
        self._service.drain(draining)

    def _servicer(self) -> WorkerServicer:
        if self._role is Role.DECODE:
            return WorkerServicer(self._service)
        facts = self._engine.facts
        return PrefillServicer(self._service, block_size=facts.block_size, vocab_size=facts.vocab_size)

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        endpoint = own_endpoint(self._config.instance_id, rpc_address=address, transfer_address="")
        facts, (prefill, decode) = self._engine.facts, self._profiles
        return conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(endpoint),
            role=role_to_wire(self._role),
            layout=to_message(common_pb2.KvLayout, facts.layout),
            fingerprint=facts.fingerprint,
            num_blocks=facts.num_blocks,
            max_num_seqs=facts.max_num_seqs,
            max_model_len=facts.max_model_len,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            prefill_profile=prefill,
            decode_profile=decode,
        )
