"""Placement in a pool of real nodes: keys are put at their home, found elsewhere, and removed and pinned everywhere."""

import os

import pytest

from moonserve.kvstore.client import chain
from moonserve.kvstore.client.cluster import new_removal_id
from moonserve.kvstore.client.node_access.objects import Key, block_of
from moonserve.protocol.errors import Overloaded
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2
from tests.kvstore.client.pools import DRAM, both_ways, fresh
from tests.kvstore.faults.pool import Pool
from tests.patience import until

pytestmark = pytest.mark.slow

VALUE = os.urandom(100_000)


def test_keys_are_stored_at_home_and_chains_stay_together(shared_pool: Pool) -> None:
    with shared_pool.store() as store:
        names: list[Key] = [fresh() for _ in range(12)]
        store.batch_put((name, b"value") for name in names)
        blocks = chain([BlockKey(os.urandom(16)) for _ in range(12)])
        store.batch_put((block, b"value") for block in blocks)
        for name in [*names, *blocks]:
            assert shared_pool.holders(name) == {shared_pool.rank_of(name)[0]}
        assert len({shared_pool.rank_of(block)[0] for block in blocks}) == 1
        assert store.batch_get([*names, *blocks]) == [b"value"] * 24


@both_ways
def test_a_key_away_from_home_is_found(shared_pool: Pool, transports: tuple[str, ...]) -> None:
    name, missing = fresh(), fresh()
    shared_pool.put_at(shared_pool.rank_of(name)[2], name, VALUE)
    with shared_pool.store(transports) as store:
        assert store.batch_get([missing, name]) == [None, VALUE]
        assert store.batch_exists([missing, name]) == [False, True]
        assert store.get(name) == VALUE
        assert store.remove(name)
        assert store.get(name) is None


def test_all_replicas_are_removed_and_pinned(shared_pool: Pool) -> None:
    name = fresh()
    for node_id in shared_pool.running:
        shared_pool.put_at(node_id, name, VALUE)
    with shared_pool.store() as store:
        assert store.pin([name], "soft") == 3
        assert store.batch_remove([name]) == 3
    assert shared_pool.holders(name) == set()


def test_a_removal_learned_from_others_is_answered_like_a_first_one(shared_pool: Pool) -> None:
    name = fresh()
    first, second, _ = shared_pool.rank_of(name)
    shared_pool.put_at(second, name, VALUE)
    request = kvstore_pb2.StoreRemoveRequest(keys=[block_of(name).key], removal_id=new_removal_id())
    assert shared_pool.ask(first, "Remove", request).removed == 0
    until(lambda: not shared_pool.holders(name))
    assert [shared_pool.ask(second, "Remove", request).removed for _ in range(2)] == [1, 1]


@both_ways
def test_draining_node_takes_nothing_new_and_serves_what_it_has(shared_pool: Pool, transports: tuple[str, ...]) -> None:
    old, new = fresh(), fresh()
    while shared_pool.rank_of(new)[0] != shared_pool.rank_of(old)[0]:
        new = fresh()
    first, second, _ = shared_pool.rank_of(new)
    with shared_pool.store(transports) as store, shared_pool.alone(first) as alone:
        store.put(old, VALUE)
        shared_pool.ask(first, "SetDraining", kvstore_pb2.StoreSetDrainingRequest(draining=True))
        try:
            store.put(new, VALUE)
            assert store.batch_get([old, new]) == [VALUE, VALUE]
            with pytest.raises(Overloaded, match="drained"):
                alone.put(fresh(), b"x")
        finally:
            shared_pool.ask(first, "SetDraining", kvstore_pb2.StoreSetDrainingRequest(draining=False))
    assert shared_pool.holders(new) == {second}


def test_puts_at_a_full_node_go_to_the_next_one(pool: Pool) -> None:
    with pool.store() as store:
        name = fresh()
        first, second, _ = pool.rank_of(name)
        with pool.alone(first) as alone:
            fill = [fresh() for _ in range(DRAM // 2**20)]
            alone.batch_put(((each, bytes(2**20)) for each in fill), pin="hard")
            held = [each for each in fill if alone.exists(each)]
            store.put(name, bytes(2**20))
            assert held
    assert pool.holders(name) == {second}
