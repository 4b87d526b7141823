"""Pins and replicas of real nodes; and copies that find no room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import KvStore, plain_key
from protocol.errors import Overloaded
from protocol.pb import kvstore_pb2 as pb
from tests.kvstore.directory.cluster import running_directory
from tests.kvstore.faults.pool import Pool, running_pool
from tests.kvstore.faults.values import put_many
from tests.patience import until
from tests.ports import free_port

pytestmark = pytest.mark.slow  # a directory and several nodes start


@contextlib.contextmanager
def cluster(folder: Path, num_nodes: int) -> Iterator[Pool]:
    port = free_port()
    with (
        running_directory(port=port),
        running_pool(folder, num_nodes, "--dram", "8MiB", registry=f"127.0.0.1:{port}") as pool,
    ):
        yield pool


def pins(pool: Pool, name: bytes) -> dict[str, int]:
    """By the nodes that hold it."""
    key = plain_key(name)
    found = {node_id: {o.key: o.pin for o in pool.objects(node_id)} for node_id in pool.running}
    return {node_id: held[key] for node_id, held in found.items() if key in held}


def fill_up(store: KvStore) -> None:
    for number in range(100):
        store.put(b"in the way %d" % number, bytes(500_000), pin="hard")


def test_copies_have_their_sources_pin_and_fewer_replicas_leave_pinned_ones(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as pool, pool.store() as store:
        [name] = put_many(store, "pinned", 1, 10_000)
        store.pin([name], "hard")
        until(lambda: store.change_replica([name], 3) and len(pins(pool, name)) == 3)
        assert pins(pool, name) == dict.fromkeys(pool.running, pb.STORE_PIN_HARD)
        for kept in ("store-2", "store-0"):
            for node_id in pool.running:
                pin = pb.STORE_PIN_HARD if node_id == kept else pb.STORE_PIN_NONE
                request = pb.StorePinRequest(keys=[plain_key(name)], pin=pin)
                pool.ask(node_id, "Pin", request)
            until(lambda: store.change_replica([name], 1) and len(pins(pool, name)) == 1)
            assert pins(pool, name) == {kept: pb.STORE_PIN_HARD}
            until(lambda: store.change_replica([name], 3) and len(pins(pool, name)) == 3)


def test_replicas_that_could_not_be_made_are_told(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as pool, pool.store() as store:
        with pool.alone("store-1") as full, pytest.raises(Overloaded):
            fill_up(full)
        with pool.alone("store-0") as source:
            names = put_many(source, "wanted", 4, 700_000)
        until(lambda: store.change_replica(names, 1).missing == 0)
        change = store.change_replica(names, 2)
        assert (change.created, change.failed, change.missing) == (0, 4, 0)
