"""A pool with a real directory: what nodes hold is known, and replicas are made, found, pinned and dropped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from deploy.ports import free_port
from kvstore.client import Block, Pin, chain, plain_key
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2 as pb
from tests.kvstore.client.pools import TCP, fresh
from tests.kvstore.directory.cluster import running_directory
from tests.kvstore.faults.pool import Pool, held, running_pool
from tests.patience import until


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    port = free_port()
    with (
        running_directory(port=port),
        running_pool(tmp_path_factory.mktemp("pool"), 3, "--dram", "8MiB", registry=f"127.0.0.1:{port}") as pool,
    ):
        pool.directory(lambda asks: asks.until_in_step(*pool.running))
        yield pool


def a_chain(length: int) -> list[Block]:
    return chain([BlockKey(os.urandom(16)) for _ in range(length)])


def values_of(blocks: Sequence[Block]) -> list[bytes]:
    return [bytes(block.key) * 100 for block in blocks]


def put(pool: Pool, node_id: str, blocks: Sequence[Block]) -> list[BlockKey]:
    with pool.alone(node_id) as store:
        store.batch_put(zip(blocks, values_of(blocks), strict=True))
    return [block.key for block in blocks]


def test_what_nodes_store_and_remove_is_known_within_moments(pool: Pool) -> None:
    blocks = a_chain(8)
    keys = put(pool, "store-0", blocks)
    put(pool, "store-1", blocks[:3])
    until(lambda: held(pool, keys) == [{"store-0", "store-1"}] * 3 + [{"store-0"}] * 5)
    with pool.alone("store-0") as store:
        store.remove(blocks[7])
    until(lambda: held(pool, keys[7:]) == [set()])


def test_asked_for_replicas_are_made_with_what_leads_to_them_and_taken_away_again(pool: Pool) -> None:
    """One wish right behind another: what was just stored is not missing, what was just made can be taken away."""
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
        with pytest.raises(InvalidRequest):
            store.change_replica(blocks, 0)
    for node_id in pool.running:
        with pool.alone(node_id) as store:
            assert store.batch_get(blocks) == values_of(blocks)


def test_the_directory_names_who_holds_what_is_at_none_of_the_likely_places(pool: Pool) -> None:
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
