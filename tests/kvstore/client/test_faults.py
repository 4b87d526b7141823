"""What goes wrong in a pool of real nodes: no wrong byte, no endless wait, another replica where there is one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client import KvStore, chain, store_lease
from kvstore.client.deadline import Deadline
from kvstore.client.keys import Key, block_of
from kvstore.client.placement import ranked
from kvstore.client.pool import new_removal_id
from protocol.errors import DeadlineExceeded, NoWorker, Overloaded, PeerLost, StaleLease
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from tests.kvstore.client.pools import (
    BOTH,
    DRAM,
    TCP,
    Pool,
    running_pool,
    running_registry,
    store_of,
    until,
)
from tests.kvstore.nodes import Node, running_node
from tests.patience import PATIENCE_S
from tests.stopping import stop

# Clusters of processes are started, stopped and killed; the file takes a minute.
pytestmark = pytest.mark.slow

both_ways = pytest.mark.parametrize("transports", [BOTH, TCP], ids=["shm", "tcp"])
VALUE = os.urandom(100_000)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with running_pool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[Pool]:
    """For tests that leave no trace but objects of their own."""
    with running_pool(3) as pool:
        yield pool


def rank_of(pool: Pool, name: Key) -> list[str]:
    return ranked(block_of(name).head, dict.fromkeys(pool.nodes, float(DRAM)))


def fresh() -> bytes:
    return os.urandom(12)


def put_at(pool: Pool, node_id: str, name: Key, value: bytes) -> None:
    """A replica at a node of the caller's choice."""
    with pool.alone(node_id) as store:
        store.put(name, value)


def holders(pool: Pool, name: Key) -> set[str]:
    found = set()
    for node_id, node in pool.nodes.items():
        if node.process.poll() is None:
            with pool.alone(node_id) as store:
                if store.exists(name):
                    found.add(node_id)
    return found


def rot(pool: Pool, node_id: str, name: Key) -> None:
    """Damages the object in the node's memory behind its back."""
    with pool.alone(node_id) as store:
        block = block_of(name)
        node = store._cluster.view.nodes[0]
        store.exists(name)
        assert node.near is not None
        entry = node.near.find(block.key)
        pool.nodes[node_id].flip_byte(entry.offset, DRAM)  # type: ignore[union-attr, arg-type]


@contextlib.contextmanager
def stopped(node: Node) -> Iterator[None]:
    stop(node.process.pid)
    try:
        yield
    finally:
        node.process.send_signal(signal.SIGCONT)


def test_keys_are_stored_at_home_and_chains_stay_together(shared_pool: Pool) -> None:
    with shared_pool.store() as store:
        names: list[Key] = [fresh() for _ in range(12)]
        store.batch_put((name, b"value") for name in names)
        blocks = chain([BlockKey(os.urandom(16)) for _ in range(12)])
        store.batch_put((block, b"value") for block in blocks)
        for name in [*names, *blocks]:
            assert holders(shared_pool, name) == {rank_of(shared_pool, name)[0]}
        assert len({rank_of(shared_pool, block)[0] for block in blocks}) == 1
        assert store.batch_get([*names, *blocks]) == [b"value"] * 24


@both_ways
def test_a_key_away_from_home_is_found_wherever_it_is(
    shared_pool: Pool, transports: tuple[str, ...]
) -> None:
    name, missing = fresh(), fresh()
    put_at(shared_pool, rank_of(shared_pool, name)[2], name, VALUE)
    with shared_pool.store(transports) as store:
        assert store.batch_get([missing, name]) == [None, VALUE]
        assert store.batch_exists([missing, name]) == [False, True]
        assert store.get(name) == VALUE
        assert store.remove(name)
        assert store.get(name) is None


def test_all_replicas_are_removed_and_pinned(shared_pool: Pool) -> None:
    name = fresh()
    for node_id in shared_pool.nodes:
        put_at(shared_pool, node_id, name, VALUE)
    with shared_pool.store() as store:
        assert store.pin([name], "soft") == 3
        assert store.batch_remove([name]) == 3
    assert holders(shared_pool, name) == set()


def test_a_removal_that_others_told_a_node_of_is_answered_as_if_it_had_come_first(
    shared_pool: Pool,
) -> None:
    """Nodes are asked one after the other, and tell each other meanwhile."""
    name = fresh()
    first, second, _ = rank_of(shared_pool, name)
    put_at(shared_pool, second, name, VALUE)
    request = kvstore_pb2.StoreRemoveRequest(keys=[block_of(name).key], removal_id=new_removal_id())
    with shared_pool.alone(first) as early, shared_pool.alone(second) as late:
        assert _removed(early, request) == 0
        until(lambda: not late.exists(name))
        assert [_removed(late, request) for _ in range(2)] == [1, 1]


def _removed(store: KvStore, request: kvstore_pb2.StoreRemoveRequest) -> int:
    [node] = store._cluster.view.nodes
    return node.call(lambda stub: stub.Remove, request, Deadline(PATIENCE_S)).removed


@both_ways
def test_a_damaged_replica_is_dropped_and_counted_and_another_one_serves(
    shared_pool: Pool, transports: tuple[str, ...]
) -> None:
    name = fresh()
    first, second, _ = rank_of(shared_pool, name)
    put_at(shared_pool, first, name, VALUE)
    put_at(shared_pool, second, name, VALUE)
    rot(shared_pool, first, name)
    with shared_pool.store(transports) as store:
        before = store.stats().counters[first]["integrity_failures"]
        assert store.get(name) == VALUE
        assert holders(shared_pool, name) == {second}
        stats = store.stats()
        assert stats.counters[first]["integrity_failures"] == before + 1
        assert stats.client["corrupt_replicas"] == 1
        rot(shared_pool, second, name)
        segment = store.allocate(len(VALUE))
        assert store.get_into(name, segment) is None
        with store.lease([name]) as lease:
            assert lease.views == (None,)
    assert holders(shared_pool, name) == set()


def test_a_damaged_replica_is_not_leased(shared_pool: Pool) -> None:
    name = fresh()
    first, second, _ = rank_of(shared_pool, name)
    put_at(shared_pool, first, name, VALUE)
    put_at(shared_pool, second, name, VALUE)
    rot(shared_pool, first, name)
    with shared_pool.store() as store, store.lease([name]) as lease:
        [view] = lease.views
        assert view == VALUE


@both_ways
def test_readers_go_on_with_another_replica_when_a_node_is_killed(
    pool: Pool, transports: tuple[str, ...]
) -> None:
    name, value = fresh(), os.urandom(3 * 2**20)
    first, second, _ = rank_of(pool, name)
    put_at(pool, first, name, value)
    put_at(pool, second, name, value)
    results: list[bool] = []
    killed = threading.Event()

    def read(store: KvStore) -> None:
        after = 0
        while after < 10:
            results.append(store.get(name, timeout_s=PATIENCE_S) == value)
            after += killed.is_set()

    with pool.store(transports) as store:
        reader = threading.Thread(target=read, args=[store])
        reader.start()
        until(lambda: len(results) > 3)
        pool.nodes[first].kill()
        killed.set()
        reader.join(2 * PATIENCE_S)
        assert not reader.is_alive()
        assert all(results)
        until(lambda: {node.node_id for node in store.nodes() if node.resting} == {first})
        with pytest.raises(PeerLost):
            store.remove(name)
        assert holders(pool, name) == set()


@both_ways
def test_what_only_a_killed_node_had_is_unreachable_and_not_missing(
    pool: Pool, transports: tuple[str, ...]
) -> None:
    name = fresh()
    with pool.store(transports) as store:
        store.put(name, VALUE)
        pool.nodes[rank_of(pool, name)[0]].kill()
        store._touches.note(store._cluster.view.by_id(rank_of(pool, name)[0]), b"")  # type: ignore[arg-type]
        until(lambda: any(node.resting for node in store.nodes()))
        with pytest.raises(PeerLost):
            store.get(name, timeout_s=PATIENCE_S)
        store.put(name, VALUE)
        assert store.get(name) == VALUE
    assert holders(pool, name) == {rank_of(pool, name)[1]}


@both_ways
def test_a_stopped_node_costs_a_part_of_the_time_and_then_none(
    pool: Pool, transports: tuple[str, ...]
) -> None:
    name, other = fresh(), fresh()
    first, second, _ = rank_of(pool, name)
    while rank_of(pool, other)[0] != first:
        other = fresh()
    put_at(pool, second, name, VALUE)
    with pool.store(transports) as store:
        store.put(fresh(), b"attaches")
        with stopped(pool.nodes[first]):
            assert store.get(name, timeout_s=16.0) == VALUE
            store.put(other, VALUE, timeout_s=16.0)
            # Those that rest are asked last, which is never.
            assert {node.node_id for node in store.nodes() if node.resting} == {first}
            assert store.get(other, timeout_s=16.0) == VALUE
        until(lambda: not any(node.resting for node in store.nodes()))
        assert store.get(name) == store.get(other) == VALUE


def test_a_single_node_that_is_stopped_fails_within_the_time_given() -> None:
    with (
        running_node("--dram", str(DRAM)) as node,
        store_of(f"node://{node.rpc_address}", TCP) as store,
    ):
        store.put(b"key", VALUE)
        with stopped(node):
            for call in (
                lambda: store.get(b"key", timeout_s=0.5),
                lambda: store.put(b"new", b"value", timeout_s=0.5),
                lambda: store.remove(b"key", timeout_s=0.5),
            ):
                with pytest.raises((PeerLost, DeadlineExceeded)):
                    call()
        until(lambda: not any(each.resting for each in store.nodes()))
        assert store.get(b"key") == VALUE


def test_a_node_that_comes_back_under_its_address_is_used_again() -> None:
    with running_node("--dram", str(DRAM)) as node:
        url = f"node://{node.rpc_address}"
        port = node.rpc_address.rpartition(":")[2]
        with store_of(url) as store:
            store.put(b"key", VALUE)
            node.stop()
            until(lambda: _unreachable(store))
            with running_node("--dram", str(DRAM), "--port", port):
                until(lambda: not any(each.resting for each in store.nodes()))
                assert store.get(b"key") is None
                store.put(b"key", b"another")
                assert store.get(b"key") == b"another"


def _unreachable(store: KvStore) -> bool:
    store.exists_at_once(b"key")
    return any(each.resting for each in store.nodes())


def test_a_node_that_is_given_up_while_another_thread_connects_is_used_again(
    shared_pool: Pool,
) -> None:
    with shared_pool.alone("store-0") as store:
        [node] = store._cluster.view.nodes

        class Other:
            """A connection during whose end there is a new one."""

            def close(self) -> None:
                node._channels.add(Connection())  # type: ignore[arg-type]

        class Connection:
            def close(self) -> None:
                """It has none."""

        node._channels.add(Other())  # type: ignore[arg-type]
        node.lost(PeerLost("it did not answer"))
        until(lambda: not node.resting)
        assert store.get(fresh()) is None


def test_a_lease_that_could_not_be_renewed_makes_its_reader_discard(shared_pool: Pool) -> None:
    name = fresh()
    first = rank_of(shared_pool, name)[0]
    with shared_pool.store() as store:
        store.put(name, VALUE)
        lease = store.lease([name], ttl_s=0.6)
        with pytest.raises(StaleLease), lease, stopped(shared_pool.nodes[first]):
            until(lambda: _is_stale(lease))
        assert lease.views[0] is not None
        until(lambda: not any(each.resting for each in store.nodes()))


def test_a_lease_is_renewed_for_as_long_as_it_is_open(shared_pool: Pool) -> None:
    name = fresh()
    with shared_pool.store() as store:
        store.put(name, VALUE)
        with store.lease([name], ttl_s=5.0) as lease:
            [held] = lease._leases
            first_end = held.expires_at
            until(lambda: time.monotonic() > first_end + 0.5)
            lease.check()
            assert lease.views[0] == VALUE


def _is_stale(lease: object) -> bool:
    try:
        lease.check()  # type: ignore[attr-defined]
    except StaleLease:
        return True
    return False


def test_a_lease_at_a_node_that_died_before_it_was_read_does_not_count(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be renewed, and what was read elsewhere need not be discarded for it."""
    name = fresh()
    first, second, _ = rank_of(pool, name)
    put_at(pool, first, name, VALUE)
    put_at(pool, second, name, VALUE)
    read = store_lease.read

    def read_too_late(*args: Any) -> None:
        monkeypatch.setattr(store_lease, "read", read)
        pool.nodes[first].kill()
        read(*args)

    with pool.store(TCP) as store:
        monkeypatch.setattr(store_lease, "read", read_too_late)
        with store.lease([name], timeout_s=PATIENCE_S) as lease:
            assert lease.views == (VALUE,)
            assert [held.node.node_id for held in lease._leases] == [second]


def test_a_draining_node_takes_nothing_new_and_serves_what_it_has(shared_pool: Pool) -> None:
    old, new = fresh(), fresh()
    while rank_of(shared_pool, new)[0] != rank_of(shared_pool, old)[0]:
        new = fresh()
    first, second, _ = rank_of(shared_pool, new)
    with shared_pool.store() as store, shared_pool.alone(first) as alone:
        store.put(old, VALUE)
        _drain(alone, draining=True)
        try:
            store.put(new, VALUE)
            assert store.batch_get([old, new]) == [VALUE, VALUE]
            with pytest.raises(Overloaded, match="drained"):
                alone.put(fresh(), b"x")
        finally:
            _drain(alone, draining=False)
    assert holders(shared_pool, new) == {second}


def _drain(store: KvStore, *, draining: bool) -> None:
    [node] = store._cluster.view.nodes
    request = kvstore_pb2.StoreSetDrainingRequest(draining=draining)
    node.call(lambda stub: stub.SetDraining, request, Deadline(PATIENCE_S))


def test_a_node_without_room_passes_puts_on(pool: Pool) -> None:
    with pool.store() as store:
        name = fresh()
        first, second, _ = rank_of(pool, name)
        with pool.alone(first) as alone:
            fill = [fresh() for _ in range(DRAM // 2**20)]
            alone.batch_put(((each, bytes(2**20)) for each in fill), pin="hard")
            held = [each for each in fill if alone.exists(each)]
            store.put(name, bytes(2**20))
            assert held
    assert holders(pool, name) == {second}


def test_a_pool_without_nodes_says_so() -> None:
    with running_registry() as registry, store_of(registry) as store:
        with pytest.raises(NoWorker):
            store.get(b"key")
        with pytest.raises(NoWorker):
            store.put(b"key", b"value")


def test_a_registry_that_dies_takes_nobody_away() -> None:
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(contextlib.ExitStack())
        address = registry.enter_context(running_registry())
        stack.enter_context(running_node("--dram", str(DRAM), "--join", address))
        store = stack.enter_context(store_of(address))
        until(lambda: store.nodes())
        registry.close()
        store.put(b"key", VALUE)
        assert store.get(b"key") == VALUE
