"""Serving as one of several active conductors: summaries are exchanged with each of the others."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.peers.leader_election_service import Service, SoleLeadership, serving_calls, tick_periodically
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.membership.conductor_client import parse_addresses
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.rpc.grpc_transport import Channels

EXCHANGE_S = 0.25
_TIMEOUT_S = 0.5


class ShardService(Service, Protocol):
    """Interface of a `ConductorService` with a shard."""

    def tick_shard(self) -> conductor_pb2.ShardSummary: ...

    def hear_shard(self, summary: conductor_pb2.ShardSummary) -> None: ...


async def serve_shard(
    config: ConductorConfig, lifecycle: Lifecycle, service: ShardService, registry: CollectorRegistry
) -> None:
    """Runs one of several active conductors until the process is asked to stop."""
    others = [address for address in parse_addresses(config.shards or "") if address != config.own_shard()]
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(
            serving_calls(config, service, SoleLeadership(is_shard=True), registry)
        )
        channels = await stack.enter_async_context(Channels(config.cluster_token, config.tls()))
        works = [tick_periodically(service, config.heartbeat_interval_s / 2), _exchange(others, channels, service)]
        tasks = [await stack.enter_async_context(background_task(work)) for work in works]
        lifecycle.ready(rpc=address)
        await lifecycle.wait_for_stop(*tasks)


async def _exchange(others: Sequence[str], channels: Channels, service: ShardService) -> None:
    """Exchanges summaries with the other active conductors until cancelled."""
    async with asyncio.TaskGroup() as group:
        while True:
            summary = service.tick_shard()
            for other in others:
                group.create_task(_exchange_with(other, summary, channels, service))
            await asyncio.sleep(EXCHANGE_S)


async def _exchange_with(
    other: str, summary: conductor_pb2.ShardSummary, channels: Channels, service: ShardService
) -> None:
    stub: conductor_pb2_grpc.ConductorAsyncStub = conductor_pb2_grpc.ConductorStub(channels.to(other))
    with contextlib.suppress(MoonserveError):  # it is not there, and may come
        service.hear_shard(await channels.call(stub.Exchange, summary, timeout_s=_TIMEOUT_S))
