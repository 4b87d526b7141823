"""Serving as an active conductor. If there are several, each exchanges summaries with the others."""

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
    """Interface of a `ConductorService`, which has a shard if there are several."""

    def tick_shard(self) -> conductor_pb2.ShardSummary: ...

    def hear_shard(self, summary: conductor_pb2.ShardSummary) -> None: ...


async def serve_active(
    config: ConductorConfig, lifecycle: Lifecycle, service: ShardService, registry: CollectorRegistry
) -> None:
    """Runs an active conductor until the process is asked to stop."""
    # Clients that were given several conductor addresses ask each one which conductor leads.
    leadership = SoleLeadership(is_shard=config.shards is not None)
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_calls(config, service, leadership, registry))
        works = [tick_periodically(service, config.heartbeat_interval_s / 2)]
        if config.shards is not None:
            others = [address for address in parse_addresses(config.shards) if address != config.own_shard()]
            channels = await stack.enter_async_context(Channels(config.cluster_token, config.tls()))
            works.append(_exchange(others, channels, service))
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
