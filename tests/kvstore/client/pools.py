"""Clients of real store nodes, and an embedded registry in this process. `tests.kvstore.faults.pool` runs the nodes."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from moonserve.kvstore.client import KvStore, connect
from moonserve.kvstore.client.node_access.background import BackgroundLoop
from moonserve.protocol.membership.embedded_registry import EmbeddedRegistry, RegistryService
from moonserve.protocol.pb import registry_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import RpcServer
from moonserve.transfer import TransferOptions
from tests.kvstore.node.nodes import TOKEN
from tests.patience import PATIENCE_S

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

    with contextlib.closing(BackgroundLoop()) as background:
        server, address = background.run(start(), PATIENCE_S)
        try:
            yield address
        finally:
            background.run(server.stop(0.0), PATIENCE_S)
