"""The directory over real nodes that are read often, full, or killed: its answers match the nodes' contents, and
replicas are made, found, pinned and dropped.

Tests in tests/kvstore/faults kill a node during a copy, and the directory.
"""

import os
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import Block, Pin, chain, plain_key
from moonserve.protocol.errors import InvalidRequest, Overloaded
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.registry.client import RemoteRegistry
from moonserve.protocol.pb import kvstore_pb2 as pb
from tests.kvstore.client.pools import TCP, fresh
from tests.kvstore.faults.pool import Pool, held, known_nodes, pool_with_directory, until_on_disk
from tests.kvstore.faults.values import put_many
from tests.kvstore.node.nodes import TOKEN, key
from tests.patience import PATIENCE_S, until

KEYS = [key(number) for number in range(8)]
BLOCKS = chain(KEYS)
VALUES = [bytes([number]) * 4096 for number in range(8)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool_with_directory(tmp_path_factory.mktemp("pool"), 3, "--dram", "8MiB") as pool:
        yield pool


def a_chain(length: int) -> list[Block]:
    return chain([BlockKey(os.urandom(16)) for _ in range(length)])


def values_of(blocks: Sequence[Block]) -> list[bytes]:
    return [bytes(block.key) * 100 for block in blocks]


def put(pool: Pool, node_id: str, blocks: Sequence[Block]) -> list[BlockKey]:
    with pool.alone(node_id) as store:
        store.batch_put(zip(blocks, values_of(blocks), strict=True))
    return [block.key for block in blocks]


def test_requested_replicas_are_made_with_their_ancestors_and_dropped_again(pool: Pool) -> None:
    """Replica changes can follow at once: objects just stored are not missing, replicas just made can be dropped."""
    blocks = a_chain(8)
    keys = put(pool, "store-0", blocks)
    with pool.store() as store:
        change = store.change_replica(blocks[-2:], 3)
        assert (change.created, change.dropped, change.missing) == (16, 0, 0)
        change = store.change_replica([*blocks, *a_chain(1)], 1)
        assert (change.created, change.dropped, change.missing) == (0, 16, 1)
        until(lambda: all(len(nodes) == 1 for nodes in held(pool, keys)))
        change = store.change_replica(blocks, 3)
        assert (change.created, change.dropped, change.missing) == (16, 0, 0)
        until(lambda: held(pool, keys) == [set(pool.running)] * 8)
        with pytest.raises(InvalidRequest):
            store.change_replica(blocks, 0)
    for node_id in pool.running:
        with pool.alone(node_id) as store:
            assert store.batch_get(blocks) == values_of(blocks)
            store.remove(blocks[7])
    until(lambda: held(pool, keys[6:]) == [set(pool.running), set()])


def test_the_directory_locates_keys_that_are_at_no_likely_node(pool: Pool) -> None:
    [block] = a_chain(1)
    last = pool.rank_of(block)[-1]
    pool.put_at(last, block, b"value")
    with pool.store(TCP) as store:
        until(lambda: store.get(block) == b"value")
        assert store._hints.get(block.key) == last


def test_copies_have_their_sources_pin_and_fewer_replicas_leave_pinned_ones(pool: Pool) -> None:
    name = fresh()
    key = plain_key(name)

    def pins() -> dict[str, int]:
        found = {node_id: {o.key: o.pin for o in pool.objects(node_id)} for node_id in pool.running}
        return {node_id: pinned[key] for node_id, pinned in found.items() if key in pinned}

    with pool.store() as store:
        store.put(name, b"value", pin=Pin.HARD)
        until(lambda: store.change_replica([name], 3) and len(pins()) == 3)
        assert pins() == dict.fromkeys(pool.running, pb.STORE_PIN_HARD)
        for kept in ("store-2", "store-0"):
            for node_id in pool.running:
                pin = pb.STORE_PIN_HARD if node_id == kept else pb.STORE_PIN_NONE
                pool.ask(node_id, "Pin", pb.StorePinRequest(keys=[key], pin=pin))
            until(lambda: store.change_replica([name], 1) and len(pins()) == 1)
            assert pins() == {kept: pb.STORE_PIN_HARD}
            until(lambda: store.change_replica([name], 3) and len(pins()) == 3)


@pytest.mark.slow
def test_a_hot_chain_gains_a_replica_that_reads_back_and_loses_it_when_it_is_cold(tmp_path: Path) -> None:
    """The planner replicates a hot chain at its next run, one second later, and drops the replica after 4 s of rest."""
    flags = ("--hot-cool-s", "4", "--hot-extra-replicas", "1")
    with (
        pool_with_directory(tmp_path, 3, "--dram", "8MiB", directory=flags) as pool,
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


@pytest.mark.slow
def test_a_killed_node_is_dropped_and_announces_its_disk_again_when_it_is_back(tmp_path: Path) -> None:
    """The directory drops a killed node 16 s later, a little after its lease ends, and lists its disk when it is back.
    The directory is a member that publishes its lean address, and it exports metrics."""
    metrics_port = free_port()
    flags, of_directory = ("--dram", "8MiB", "--ssd-write-through"), ("--metrics-port", str(metrics_port))
    with pool_with_directory(tmp_path, 2, *flags, ssd="64MiB", directory=of_directory) as pool:

        async def directory_at() -> str:
            registry = RemoteRegistry(pool.registry, TOKEN)
            members = {member.role: member for member in await registry.members()}
            await registry.close()
            return members["directory"].facts["lean"]

        with pool.alone("store-1") as store:
            store.batch_put(zip(BLOCKS, VALUES, strict=True))
        with pool.alone("store-0") as store:
            store.batch_put(zip(BLOCKS[:2], VALUES, strict=False))
        until_on_disk(pool, "store-1", BLOCKS)
        both = [{"store-0", "store-1"}] * 2 + [{"store-1"}] * 6
        until(lambda: held(pool, KEYS) == both)
        assert held(pool, KEYS, pool.background.run(directory_at(), PATIENCE_S)) == both
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as reply:
            shown = reply.read().decode()
        assert "moonserve_directory_keys 8.0" in shown
        assert "moonserve_directory_gaps_total 0.0" in shown
        pool.kill("store-1")
        until(lambda: held(pool, KEYS) == [{"store-0"}] * 2 + [set()] * 6)
        assert set(known_nodes(pool)) == {"store-0"}
        pool.start("store-1")
        until(lambda: held(pool, KEYS[2:]) == [{"store-1"}] * 6)
        with pool.alone("store-1") as store:
            assert store.batch_get(BLOCKS) == VALUES


@pytest.mark.slow
def test_replicas_that_could_not_be_made_are_reported(tmp_path: Path) -> None:
    with pool_with_directory(tmp_path, 2, "--dram", "8MiB") as pool, pool.store() as store:
        with pool.alone("store-1") as full, pytest.raises(Overloaded):
            full.batch_put(((b"%d" % n, bytes(500_000)) for n in range(100)), pin="hard")
        with pool.alone("store-0") as source:
            names = put_many(source, "wanted", 4, 700_000)
        until(lambda: store.change_replica(names, 1).missing == 0)
        change = store.change_replica(names, 2)
        assert (change.created, change.failed, change.missing) == (0, 4, 0)
