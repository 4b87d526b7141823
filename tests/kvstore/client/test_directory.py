"""A pool with a real directory process: replicas are made, found and dropped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from kvstore.client import Block, KvStore, chain
from protocol.errors import MoonserveError
from protocol.keys import BlockKey
from tests.kvstore.client.pools import DRAM, store_of
from tests.kvstore.directory.cluster import running_directory
from tests.kvstore.nodes import running_node
from tests.patience import until
from tests.ports import free_port

NUM_NODES = 4


@pytest.fixture(scope="module")
def store() -> Iterator[KvStore]:
    with contextlib.ExitStack() as stack:
        port = free_port()
        stack.enter_context(running_directory(port=port))
        registry = f"127.0.0.1:{port}"
        for number in range(NUM_NODES):
            node = running_node(
                "--dram", str(DRAM), "--join", registry, instance_id=f"store-{number}"
            )
            stack.enter_context(node)
        store = stack.enter_context(store_of(registry))
        until(lambda: len(store.nodes()) == NUM_NODES and store._cluster.view.directory)
        yield store


def a_chain(length: int) -> list[Block]:
    return chain([BlockKey(os.urandom(16)) for _ in range(length)])


def num_replicas(store: KvStore) -> int:
    return store.stats().total.num_objects


def changed(store: KvStore, blocks: list[Block], num: int) -> bool:
    """Whether the directory has heard enough to do it, and has done it."""
    with contextlib.suppress(MoonserveError):
        return store.change_replica(blocks, num).missing == 0
    return False


def test_a_chain_gains_replicas_and_loses_them(store: KvStore) -> None:
    blocks = a_chain(4)
    store.batch_put((block, bytes(block.key) * 100) for block in blocks)
    before = num_replicas(store)
    until(lambda: changed(store, blocks, 3) and num_replicas(store) == before + 8)
    assert store.batch_get(blocks) == [bytes(block.key) * 100 for block in blocks]
    until(lambda: changed(store, blocks, 1) and num_replicas(store) == before)
    assert store.batch_get(blocks) == [bytes(block.key) * 100 for block in blocks]


def test_the_directory_names_who_holds_what_is_at_none_of_the_likely_places(
    store: KvStore,
) -> None:
    block = a_chain(1)[0]
    last = store._cluster.view.ranked([block.head])[0][-1]
    with store_of(f"node://{last.address}") as alone:
        alone.put(block, b"value")
    others = store_of_remote(store)
    with others:
        until(lambda: others.get(block) == b"value")
        assert others._hints.get(block.key) == last.node_id


def store_of_remote(store: KvStore) -> KvStore:
    """Another client, which maps nothing."""
    return store_of(store._cluster.view.directory, ("tcp",))
