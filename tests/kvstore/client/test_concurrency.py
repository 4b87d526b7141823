"""Readers beside writers that replace, remove and evict what they read."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait

from kvstore.client import KvStore
from protocol.errors import InvalidRequest
from tests.kvstore.client.pools import DRAM, both_ways, store_of
from tests.kvstore.nodes import running_node

NUM_KEYS = 60
BLOCK = 200_000  # all of them are more than the node holds
NUM_ROUNDS = 400


def value_of(byte: int) -> bytes:
    """Torn reads show, as all bytes are the same."""
    return bytes([byte]) * BLOCK


def write(store: KvStore, seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(NUM_ROUNDS):
        name = b"%d" % choice.randrange(NUM_KEYS)
        if choice.random() < 0.4:
            store.remove(name)
        else:
            try:
                store.put(name, value_of(choice.randrange(256)))
            except InvalidRequest:  # another value is there
                continue


def read(store: KvStore, seed: int, done: threading.Event) -> int:
    """How often something was there."""
    choice = random.Random(seed)
    segment = store.allocate(BLOCK)
    hits = 0
    while not done.is_set():
        name = b"%d" % choice.randrange(NUM_KEYS)
        verify = choice.random() < 0.5
        if choice.random() < 0.5:
            value = store.get(name, verify=verify)
        else:
            length = store.get_into(name, segment, verify=verify)
            value = None if length is None else bytes(segment.buffer[:length])
        if value is not None:
            hits += 1
            assert value == value[:1] * BLOCK
    return hits


@both_ways
def test_nobody_reads_torn_or_foreign_bytes(transports: tuple[str, ...]) -> None:
    with running_node("--dram", str(DRAM)) as node:
        url = f"node://{node.rpc_address}"
        done = threading.Event()
        with store_of(url, transports) as reading, store_of(url) as writing, ThreadPoolExecutor(5) as threads:
            readers = [threads.submit(read, reading, n, done) for n in range(3)]
            writers = [threads.submit(write, writing, n) for n in range(2)]
            wait(writers)
            done.set()
            assert all(reader.result() for reader in readers)
            assert not any(writer.result() for writer in writers)
            stats = reading.stats()
        assert stats.client["corrupt_replicas"] == 0
        assert stats.total.leased_bytes == stats.total.reserved_bytes == 0
