"""Process and RPC service of the directory: queries of the index, and requests to change replicas."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.kvstore.directory.config import DirectoryConfig
from moonserve.kvstore.directory.heat import Heat
from moonserve.kvstore.directory.holders import Directory
from moonserve.kvstore.directory.node_follower import ClusterFollower
from moonserve.kvstore.directory.replica_planner import ReplicaPlanner
from moonserve.kvstore.directory.replicator import Replicator
from moonserve.kvstore.wire import DIRECTORY_ROLE, packed_keys_from_wire
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey, unpack_keys
from moonserve.protocol.membership.heartbeats import own_endpoint
from moonserve.protocol.membership.registry import Member, Registry
from moonserve.protocol.membership.registry.client import connect_registry
from moonserve.protocol.membership.registry.embedded import EmbeddedRegistry, RegistryService
from moonserve.protocol.membership.registry.lease import RegistryLease, load_or_create_identity, registry_lease
from moonserve.protocol.pb import directory_pb2, directory_pb2_grpc, registry_pb2_grpc
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.metrics import add_metrics_service, http_endpoint, process_registry
from moonserve.protocol.rpc.grpc_transport import Channels, Context, RpcServer
from moonserve.protocol.rpc.wire import endpoint_to_wire


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """Serves the directory's RPCs. Queries are answered without awaiting."""

    def __init__(self, following: ClusterFollower, replicator: Replicator) -> None:
        self.counters: Counter[str] = Counter()
        self._following = following
        self._directory = following.directory
        self._replicator = replicator

    async def Locate(self, request: directory_pb2.LocateRequest, context: Context) -> directory_pb2.LocateReply:
        self.counters["lookups"] += 1
        held = [self._directory.holders(key) for key in _keys(request.keys)]
        endpoints = {node: self._following.endpoint(node) for nodes in held for node in nodes}
        # Nodes whose endpoint is not known yet are left out.
        reply = directory_pb2.LocateReply(nodes=[e for e in endpoints.values() if e is not None])
        numbers = {endpoint.instance_id: n for n, endpoint in enumerate(reply.nodes)}
        for nodes in held:
            reply.holders.add(nodes=[numbers[node] for node in nodes if node in numbers])
        return reply

    async def GetNodes(self, request: directory_pb2.GetNodesRequest, context: Context) -> directory_pb2.GetNodesReply:
        nodes = [
            directory_pb2.StoreNodeView(
                # A node that has not answered yet has its endpoint from the registry.
                endpoint=each.endpoint or endpoint_to_wire(each.member.endpoint),
                in_step=each.view().in_step,
                last_heard_s=each.silence_s,
            )
            for _, each in sorted(self._following.followers.items())
        ]
        return directory_pb2.GetNodesReply(
            nodes=nodes,
            num_keys=len(self._directory),
            memory_bytes=self._directory.table.nbytes,
        )

    async def ChangeReplica(
        self, request: directory_pb2.ChangeReplicaRequest, context: Context
    ) -> directory_pb2.ChangeReplicaReply:
        keys = _keys(request.keys)
        if request.num_replicas < 1:
            raise InvalidRequest("a key has at least one replica; remove it instead")
        return await self._replicator.set_num_replicas(keys, request.num_replicas)


def _keys(packed_keys: bytes) -> list[BlockKey]:
    return unpack_keys(packed_keys_from_wire(packed_keys))


_COUNTERS = (
    ("gaps", "moonserve_directory_gaps", "Times that events of a node were missed."),
    ("resyncs", "moonserve_directory_resyncs", "Inventories taken in."),
    ("lookups", "moonserve_directory_lookups", "Calls that asked who holds blocks."),
    ("replicas_created", "moonserve_directory_replicas_created", "Replicas made."),
    ("replicas_dropped", "moonserve_directory_replicas_dropped", "Replicas removed."),
    ("copies_failed", "moonserve_directory_copies_failed", "Copies that were not done in full."),
    ("drops_failed", "moonserve_directory_drops_failed", "Removals that nodes did not answer."),
)


class DirectoryCollector(Collector):
    """Collects the directory's metrics at each scrape. `counters` of the parts have distinct names."""

    def __init__(self, following: ClusterFollower, counters: Sequence[Mapping[str, int]]) -> None:
        self._following = following
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        followers = list(self._following.followers.values())
        index = self._following.directory
        in_step = sum(follower.in_step for follower in followers)
        gauges = (
            ("moonserve_directory_keys", "Blocks in the index.", len(index)),
            ("moonserve_directory_bytes", "Memory of the index.", index.table.nbytes),
            ("moonserve_directory_nodes", "Store nodes that are followed.", len(followers)),
            ("moonserve_directory_nodes_in_step", "Of them, without a gap.", in_step),
        )
        for name, help_text, value in gauges:
            yield GaugeMetricFamily(name, help_text, value=value)
        counts = {name: n for counters in self._counters for name, n in list(counters.items())}
        for counter, name, help_text in _COUNTERS:
            yield CounterMetricFamily(name, help_text, value=counts.get(counter, 0))


STOP_GRACE_S = 0.5


class DirectoryProcess:
    """One directory process. It owns no state that cannot be rebuilt."""

    def __init__(self, config: DirectoryConfig, metrics: CollectorRegistry) -> None:
        self._config = config
        self._server = RpcServer(config.cluster_token, config.tls())
        self._channels = Channels(config.cluster_token, config.tls())
        directory = Directory()
        heat = Heat(threshold=config.hot_hits, window_s=config.hot_window_s)
        clock = asyncio.get_running_loop().time  # monotonic
        self._following = ClusterFollower(directory, self._channels, lambda keys: heat.record(keys, clock()), clock)
        self._replicator = Replicator(
            ReplicaPlanner(directory, heat, extra_replicas=config.hot_extra_replicas, cool_s=config.hot_cool_s),
            self._channels,
            self._following.views,
            self._following.endpoint,
            config.copies_at_once,
            clock,
        )
        self._service = DirectoryService(self._following, self._replicator)
        parts = (self._following, self._replicator, self._service)
        add_metrics_service(self._server.grpc, config.instance_id, metrics)
        metrics.register(DirectoryCollector(self._following, [part.counters for part in parts]))

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until the lifecycle stops it. Raises ConfigError if the port is taken, or the error that ended the
        membership."""
        directory_pb2_grpc.add_DirectoryServicer_to_server(self._service, self._server.grpc)
        self._server.add_socket_service("Directory", self._service)
        registry = self._registry()
        address = await self._server.start(self._config.host, self._config.port)
        try:
            async with (
                background_task(self._following.run(registry)) as following,
                background_task(self._replicator.run()) as replicating,
                self._registered(registry, address) as seat,
            ):
                lifecycle.ready(rpc=address, lean=self._server.lean_address)
                await lifecycle.wait_for_stop(following, replicating, seat)
        finally:
            await self._server.stop(STOP_GRACE_S)
            await self._channels.close()
            await registry.close()

    def _registry(self) -> Registry:
        """Connects to the configured registry, or creates one that this process serves."""
        if self._config.registry is not None:
            return connect_registry(
                self._config.registry,
                cluster_token=self._config.cluster_token,
                tls=self._config.tls(),
            )
        embedded = EmbeddedRegistry()
        registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(embedded), self._server.grpc)
        return embedded

    def _registered(self, registry: Registry, address: str) -> AbstractAsyncContextManager[asyncio.Task[None]]:
        identity = load_or_create_identity(None, self._config.instance_id)
        endpoint = own_endpoint(self._config.instance_id, rpc_address=address, transfer_address="")
        facts = {
            "lean": self._server.lean_address,
            "lean_unix": self._server.lean_unix_address,
        }
        member = Member(endpoint=endpoint, role=DIRECTORY_ROLE, owner=identity.owner, facts=facts)
        return registry_lease(RegistryLease(registry, member))


async def serve(config: DirectoryConfig, lifecycle: Lifecycle) -> None:
    """Runs a directory until the process is stopped. Raises ConfigError if it cannot start."""
    metrics = process_registry()
    with http_endpoint(metrics, config.host, config.metrics_port):
        await DirectoryProcess(config, metrics).run(lifecycle)
