"""Clients of real store nodes, and an embedded registry in this process. `tests.kvstore.faults.pool` runs the nodes."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from moonserve.kvstore.client import KvStore, connect
from moonserve.kvstore.client.node_access.background import BackgroundLoop
from moonserve.transfer import TransferOptions
from tests.kvstore.node.nodes import TOKEN, Node, running_node
from tests.patience import PATIENCE_S
from tests.protocol.membership.conftest import served

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
def own_node(*flags: str, transports: tuple[str, ...] = BOTH) -> Iterator[tuple[Node, KvStore]]:
    """Runs a node of its own and a client, for tests that end the node or need other flags."""
    with running_node("--dram", str(DRAM), *flags) as node, store_of(f"node://{node.rpc_address}", transports) as store:
        yield node, store


@contextlib.contextmanager
def running_registry() -> Iterator[str]:
    """Serves an embedded registry from this process. Yields its address."""
    with contextlib.closing(BackgroundLoop()) as background:
        serving = served(token=TOKEN)
        try:
            yield background.run(serving.__aenter__(), PATIENCE_S)
        finally:
            background.run(serving.__aexit__(None, None, None), PATIENCE_S)
