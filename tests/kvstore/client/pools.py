"""Clients of real store nodes, and an embedded registry in this process. `tests.kvstore.faults.pool` runs the nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from kvstore.client import KvStore, connect
from kvstore.client.backstage import Backstage
from protocol.pb import registry_pb2_grpc
from protocol.registry.embedded import EmbeddedRegistry
from protocol.registry.service import RegistryService
from protocol.rpc import RpcServer
from tests.kvstore.nodes import TOKEN
from tests.patience import PATIENCE_S
from transfer import TransferOptions

DRAM = 8 * 2**20
BOTH = ("shm", "tcp")
TCP = ("tcp",)
both_ways = pytest.mark.parametrize("transports", [BOTH, TCP], ids=["shm", "tcp"])


def fresh() -> bytes:
    """Returns a random key that no other test has used."""
    return os.urandom(12)


def store_of(url: str, transports: tuple[str, ...] = BOTH) -> KvStore:
    options = TransferOptions(transports=transports, checksums=False)
    return connect(url, cluster_token=TOKEN, options=options, timeout_s=PATIENCE_S)


@contextlib.contextmanager
def running_registry() -> Iterator[str]:
    """Serves an embedded registry from this process. Yields its address."""

    async def start() -> tuple[RpcServer, str]:
        server = RpcServer(TOKEN)
        registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(EmbeddedRegistry()), server.grpc)
        return server, await server.start("127.0.0.1", 0)

    with contextlib.closing(Backstage()) as backstage:
        server, address = backstage.ask(start(), PATIENCE_S)
        try:
            yield address
        finally:
            backstage.ask(server.stop(0.0), PATIENCE_S)
