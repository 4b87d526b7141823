"""Clusters of real store nodes around an embedded registry of this process, and clients of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvstore.client import KvStore, connect
from kvstore.client.backstage import Backstage
from kvstore.client.keys import Key, block_of
from kvstore.client.placement import ranked
from protocol.pb import registry_pb2_grpc
from protocol.registry.embedded import EmbeddedRegistry
from protocol.registry.service import RegistryService
from protocol.rpc import RpcServer
from tests.kvstore.nodes import TOKEN, Node, running_node
from tests.patience import PATIENCE_S, until
from transfer import TransferOptions

DRAM = 8 * 2**20
BOTH = ("shm", "tcp")
TCP = ("tcp",)
both_ways = pytest.mark.parametrize("transports", [BOTH, TCP], ids=["shm", "tcp"])


def fresh() -> bytes:
    """A key that nobody has used."""
    return os.urandom(12)


def store_of(url: str, transports: tuple[str, ...] = BOTH) -> KvStore:
    options = TransferOptions(transports=transports, checksums=False)
    return connect(url, cluster_token=TOKEN, options=options, timeout_s=PATIENCE_S)


@contextlib.contextmanager
def running_registry() -> Iterator[str]:
    """An embedded registry, served by this process; gives its address."""
    backstage = Backstage()
    servers: list[RpcServer] = []

    async def start() -> str:
        server = RpcServer(TOKEN)
        servers.append(server)
        service = RegistryService(EmbeddedRegistry())
        registry_pb2_grpc.add_RegistryServicer_to_server(service, server.grpc)
        return await server.start("127.0.0.1", 0)

    try:
        yield backstage.ask(start(), PATIENCE_S)
    finally:
        for server in servers:
            backstage.ask(server.stop(0.0), PATIENCE_S)
        backstage.close()


@dataclass(slots=True)
class Pool:
    """`nodes` by id."""

    registry: str
    nodes: dict[str, Node] = field(default_factory=dict)

    def store(self, transports: tuple[str, ...] = BOTH) -> KvStore:
        """A client that knows all nodes."""
        store = store_of(self.registry, transports)
        until(lambda: len(store.nodes()) == len(self.nodes))
        return store

    def alone(self, node_id: str) -> KvStore:
        """A client of one node, whatever belongs where."""
        return store_of(f"node://{self.nodes[node_id].rpc_address}")

    def rank_of(self, name: Key) -> list[str]:
        """The nodes in the order in which `name` is put."""
        return ranked(block_of(name).head, dict.fromkeys(self.nodes, float(DRAM)))

    def put_at(self, node_id: str, name: Key, value: bytes) -> None:
        """A replica at a node of the caller's choice."""
        with self.alone(node_id) as store:
            store.put(name, value)

    def holders(self, name: Key) -> set[str]:
        """Those that live and have `name`."""
        found = set()
        for node_id, node in self.nodes.items():
            if node.process.poll() is None:
                with self.alone(node_id) as store:
                    if store.exists(name):
                        found.add(node_id)
        return found


@contextlib.contextmanager
def running_pool(num_nodes: int, *flags: str) -> Iterator[Pool]:
    with contextlib.ExitStack() as stack:
        pool = Pool(stack.enter_context(running_registry()))
        for number in range(num_nodes):
            node_id = f"store-{number}"
            node = running_node(
                "--dram", str(DRAM), "--join", pool.registry, *flags, instance_id=node_id
            )
            pool.nodes[node_id] = stack.enter_context(node)
        yield pool
