"""Faults in a pool of real nodes: clients get no wrong byte, wait a limited time, and use another replica if any."""

import os
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from moonserve.kvstore.client import KvStore, store_lease
from moonserve.kvstore.client.node_access.objects import Key, block_of
from moonserve.protocol.errors import PeerLost, StaleLease
from tests.kvstore.client.pools import DRAM, TCP, both_ways, fresh, own_node
from tests.kvstore.faults.pool import Pool
from tests.kvstore.node.nodes import running_node
from tests.patience import PATIENCE_S, until

VALUE = os.urandom(100_000)


def rot(pool: Pool, node_id: str, name: Key) -> None:
    """Damages the object in the node's memory without the node's knowledge."""
    with pool.alone(node_id) as store:
        block = block_of(name)
        node = store._cluster.view.nodes[0]
        store.exists(name)
        assert node.near is not None
        entry = node.near.find(block.key)
        pool.running[node_id].flip_byte(entry.offset, DRAM)  # type: ignore[union-attr, arg-type]


def stored_twice(pool: Pool, value: bytes = VALUE) -> tuple[bytes, str, str]:
    """Stores a value at the two nodes that are searched first. Returns its key and these nodes."""
    name = fresh()
    first, second, _ = pool.rank_of(name)
    for node_id in (first, second):
        pool.put_at(node_id, name, value)
    return name, first, second


@both_ways
@pytest.mark.parametrize("is_leased", [False, True])
def test_a_damaged_replica_is_dropped_and_counted_and_another_one_serves(
    shared_pool: Pool, transports: tuple[str, ...], is_leased: bool
) -> None:
    name, first, second = stored_twice(shared_pool)
    rot(shared_pool, first, name)
    with shared_pool.store(transports) as store:
        before = store.stats().counters[first]["integrity_failures"]
        if is_leased:
            with store.lease([name]) as lease:
                assert lease.views == (VALUE,)
        else:
            assert store.get(name) == VALUE
        assert shared_pool.holders(name) == {second}
        stats = store.stats()
        assert stats.counters[first]["integrity_failures"] == before + 1
        assert stats.client["corrupt_replicas"] == 1
        rot(shared_pool, second, name)
        segment = store.allocate(len(VALUE))
        assert store.get_into(name, segment) is None
        with store.lease([name]) as lease:
            assert lease.views == (None,)
    assert shared_pool.holders(name) == set()


@both_ways
def test_readers_go_on_with_another_replica_when_a_node_is_killed(pool: Pool, transports: tuple[str, ...]) -> None:
    name, first, _ = stored_twice(pool, value := os.urandom(3 * 2**20))
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
        pool.kill(first)
        killed.set()
        reader.join(2 * PATIENCE_S)
        assert not reader.is_alive()
        assert all(results)
        until(lambda: {node.node_id for node in store.nodes() if node.resting} == {first})
        with pytest.raises(PeerLost):
            store.remove(name)
        assert pool.holders(name) == set()


@both_ways
def test_a_key_only_at_a_killed_node_is_unreachable_and_not_missing(pool: Pool, transports: tuple[str, ...]) -> None:
    name = fresh()
    with pool.store(transports) as store:
        store.put(name, VALUE)
        first, second, _ = pool.rank_of(name)
        node = store._cluster.view.by_id(first)
        pool.kill(first)
        store._touches.note(node, b"")  # type: ignore[arg-type]
        until(lambda: any(node.resting for node in store.nodes()))
        with pytest.raises(PeerLost):
            store.get(name, timeout_s=PATIENCE_S)
        store.put(name, VALUE)
        assert store.get(name) == VALUE
    assert pool.holders(name) == {second}


@both_ways
def test_a_stopped_node_costs_a_part_of_the_time_and_then_none(pool: Pool, transports: tuple[str, ...]) -> None:
    name, other = fresh(), fresh()
    first, second, _ = pool.rank_of(name)
    while pool.rank_of(other)[0] != first:
        other = fresh()
    pool.put_at(second, name, VALUE)
    with pool.store(transports) as store:
        store.put(fresh(), b"attaches")
        with pool.frozen(first):
            assert store.get(name, timeout_s=16.0) == VALUE
            store.put(other, VALUE, timeout_s=16.0)
            # The resting node is not queried, since the others answer first.
            assert {node.node_id for node in store.nodes() if node.resting} == {first}
            assert store.get(other, timeout_s=16.0) == VALUE
        until(lambda: not any(node.resting for node in store.nodes()))
        assert store.get(name) == store.get(other) == VALUE


def test_a_node_that_comes_back_under_its_address_is_used_again() -> None:
    with own_node() as (node, store):
        store.put(b"key", VALUE)
        node.stop()
        until(lambda: _unreachable(store))
        with running_node("--dram", str(DRAM), "--port", node.rpc_address.rpartition(":")[2]):
            until(lambda: not any(each.resting for each in store.nodes()))
            assert store.get(b"key") is None
            store.put(b"key", b"another")
            assert store.get(b"key") == b"another"


def _unreachable(store: KvStore) -> bool:
    store.exists_at_once(b"key")
    return any(each.resting for each in store.nodes())


def test_a_node_that_is_given_up_while_another_thread_connects_is_used_again(shared_pool: Pool) -> None:
    with shared_pool.alone("store-0") as store:
        [node] = store._cluster.view.nodes
        another = Mock()  # a connection that opens while the first one is closing
        node._channels.add(Mock(close=lambda: node._channels.add(another)))
        node.mark_lost(PeerLost("it did not answer"))
        until(lambda: not node.resting)
        assert store.get(fresh()) is None


def test_a_lease_that_could_not_be_renewed_makes_its_reader_discard(shared_pool: Pool) -> None:
    name = fresh()
    first = shared_pool.rank_of(name)[0]
    with shared_pool.store() as store:
        store.put(name, VALUE)
        lease = store.lease([name], ttl_s=0.6)
        with pytest.raises(StaleLease), lease, shared_pool.frozen(first), pytest.raises(StaleLease):
            until(lease.check)
        assert lease.views[0] is not None
        until(lambda: not any(each.resting for each in store.nodes()))


def test_a_lease_is_renewed_for_as_long_as_it_is_open(shared_pool: Pool) -> None:
    name = fresh()
    with shared_pool.store() as store:
        store.put(name, VALUE)
        with store.lease([name], ttl_s=5.0) as lease:
            [held] = lease._leases
            first_end = held.lease.expires_at
            until(lambda: time.monotonic() > first_end + 0.5)
            lease.check()
            assert lease.views[0] == VALUE


def test_lease_at_node_that_died_before_it_was_read_does_not_count(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    name, first, second = stored_twice(pool)
    read = store_lease.read_runs

    def read_too_late(*args: Any) -> None:
        monkeypatch.setattr(store_lease, "read_runs", read)
        pool.kill(first)
        read(*args)

    with pool.store(TCP) as store:
        monkeypatch.setattr(store_lease, "read_runs", read_too_late)
        with store.lease([name], timeout_s=PATIENCE_S) as lease:
            assert lease.views == (VALUE,)
            assert [held.node.node_id for held in lease._leases] == [second]
