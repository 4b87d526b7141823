"""The directory over real nodes that are read often, full, or killed; what it says is what the nodes hold.

A death in the midst of a copy, and of the directory, are in tests/kvstore/faults.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from deploy.ports import free_port
from kvstore.client import chain
from protocol.errors import Overloaded
from protocol.registry.remote import RemoteRegistry
from tests.kvstore.directory.cluster import asking, running_directory
from tests.kvstore.faults.pool import held, running_pool, until_on_disk
from tests.kvstore.faults.values import put_many
from tests.kvstore.nodes import TOKEN, key
from tests.patience import PATIENCE_S, until

KEYS = [key(number) for number in range(8)]
BLOCKS = chain(KEYS)
VALUES = [bytes([number]) * 4096 for number in range(8)]


def test_a_hot_chain_gains_a_replica_that_reads_back_and_loses_it_when_it_is_cold(tmp_path: Path) -> None:
    """It is replicated at the next look, one second later, and cools for four."""
    port = free_port()
    flags = ("--hot-cool-s", "4", "--hot-extra-replicas", "1")
    with (
        running_directory(*flags, port=port),
        running_pool(tmp_path, 3, "--dram", "8MiB", registry=f"127.0.0.1:{port}") as pool,
        pool.alone("store-0") as store,
    ):
        store.batch_put(zip(BLOCKS, VALUES, strict=True))

        def is_replicated() -> set[str]:
            for _ in range(9):
                store.batch_get(BLOCKS)
            store._touches.flush(PATIENCE_S)
            return set.intersection(*held(pool, KEYS)) - {"store-0"}

        until(is_replicated)
        [replica] = set.intersection(*held(pool, KEYS)) - {"store-0"}
        with pool.alone(replica) as other:
            assert other.batch_get(BLOCKS) == VALUES
        until(lambda: held(pool, KEYS) == [{"store-0"}] * 8)
        assert store.batch_get(BLOCKS) == VALUES


def test_a_killed_node_is_dropped_and_announces_its_disk_again_when_it_is_back(tmp_path: Path) -> None:
    """A node that was killed is believed in until its lease has ended, and a little longer: 16 s. The directory is a
    member, which says where it can be asked quickly, and what it counts."""
    port, metrics_port = free_port(), free_port()
    flags = ("--dram", "8MiB", "--ssd-write-through")
    with (
        running_directory("--metrics-port", str(metrics_port), port=port),
        running_pool(tmp_path, 2, *flags, ssd="64MiB", registry=f"127.0.0.1:{port}") as pool,
    ):

        async def directory_at() -> str:
            registry = RemoteRegistry(f"127.0.0.1:{port}", TOKEN)
            members = {member.role: member for member in await registry.members()}
            await registry.close()
            return members["directory"].facts["lean"]

        async def holders(lean: str) -> list[set[str]]:
            async with asking(port, lean) as asks:
                return await asks.holders(KEYS)

        with pool.alone("store-1") as store:
            store.batch_put(zip(BLOCKS, VALUES, strict=True))
        with pool.alone("store-0") as store:
            store.batch_put(zip(BLOCKS[:2], VALUES, strict=False))
        until_on_disk(pool, "store-1", BLOCKS)
        both = [{"store-0", "store-1"}] * 2 + [{"store-1"}] * 6
        until(lambda: held(pool, KEYS) == both)
        lean = pool.backstage.ask(directory_at(), PATIENCE_S)
        assert pool.backstage.ask(holders(lean), PATIENCE_S) == both
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as reply:
            shown = reply.read().decode()
        assert "moonserve_directory_keys 8.0" in shown
        assert "moonserve_directory_gaps_total 0.0" in shown
        pool.kill("store-1")
        until(lambda: held(pool, KEYS) == [{"store-0"}] * 2 + [set()] * 6)
        assert set(pool.directory(lambda asks: asks.nodes())) == {"store-0"}
        pool.start("store-1")
        until(lambda: held(pool, KEYS[2:]) == [{"store-1"}] * 6)
        with pool.alone("store-1") as store:
            assert store.batch_get(BLOCKS) == VALUES


def test_replicas_that_could_not_be_made_are_told(tmp_path: Path) -> None:
    port = free_port()
    with (
        running_directory(port=port),
        running_pool(tmp_path, 2, "--dram", "8MiB", registry=f"127.0.0.1:{port}") as pool,
        pool.store() as store,
    ):
        with pool.alone("store-1") as full, pytest.raises(Overloaded):
            full.batch_put(((b"%d" % n, bytes(500_000)) for n in range(100)), pin="hard")
        with pool.alone("store-0") as source:
            names = put_many(source, "wanted", 4, 700_000)
        until(lambda: store.change_replica(names, 1).missing == 0)
        change = store.change_replica(names, 2)
        assert (change.created, change.failed, change.missing) == (0, 4, 0)
