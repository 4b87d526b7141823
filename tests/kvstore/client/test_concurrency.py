"""Concurrent readers and writers: values are never torn while writers replace, remove and evict them, and a client
waits for other writers of its keys without blaming the node."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from moonserve.kvstore.client import KvStore, plain_key, puts
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.puts import PutsAtNode
from moonserve.kvstore.state.objects import PutOutcome
from moonserve.protocol.errors import DeadlineExceeded, InvalidRequest
from moonserve.protocol.pb import kvstore_pb2
from tests.kvstore.client.pools import DRAM, both_ways, store_of
from tests.kvstore.node.nodes import Node, running_node
from tests.patience import PATIENCE_S

NUM_KEYS = 60
BLOCK = 200_000  # all blocks together exceed the node's memory
NUM_ROUNDS = 400
VALUE = os.urandom(64 * 1024)


def write(store: KvStore, seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(NUM_ROUNDS):
        name = b"%d" % choice.randrange(NUM_KEYS)
        if choice.random() < 0.4:
            store.remove(name)
        else:
            try:
                store.put(name, bytes([choice.randrange(256)]) * BLOCK)  # equal bytes: a torn read shows
            except InvalidRequest:  # the key already has another value
                continue


def read(store: KvStore, seed: int, done: threading.Event) -> int:
    """Reads random keys until `done` is set. Returns the number of hits, all of which must be whole."""
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


@pytest.mark.slow
@both_ways
def test_readers_never_see_torn_or_foreign_bytes(transports: tuple[str, ...]) -> None:
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


def begin_to_write(store: KvStore, name: bytes) -> None:
    """Reserves a key as another writer would, under a reservation id equal to the key."""
    [at] = store._cluster.view.nodes
    request = kvstore_pb2.StoreReserveRequest(reservation_id=name.decode(), ttl_s=60.0)
    request.wishes.add(key=plain_key(name), length=len(VALUE))
    at.call(lambda stub: stub.Reserve, request, Deadline(PATIENCE_S))


def test_a_node_is_not_given_up_for_another_writer_that_takes_too_long(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puts, "_WAIT_SHARE", 0.0)
    with store_of(f"node://{node.rpc_address}") as store:
        store.put(b"stored", b"value")
        begin_to_write(store, b"never written")
        with pytest.raises(DeadlineExceeded):
            store.put(b"never written", b"value")
        assert store.get(b"stored") == b"value"
        assert not any(each.resting for each in store.nodes())


def test_each_of_several_other_writers_is_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch put waits for every other writer of its keys, also if one key becomes free before the others."""
    names = [b"given up", b"still written"]
    with store_of(f"node://{node.rpc_address}") as store:
        [at] = store._cluster.view.nodes
        for name in names:
            begin_to_write(store, name)
        waited_for = iter(names)
        write = PutsAtNode._write

        def end_one_and_write(*args: Any) -> bool:
            if args[-1] is PutOutcome.IN_PROGRESS and args[-1] in args[-2]:
                abort = kvstore_pb2.StoreAbortRequest(reservation_id=next(waited_for).decode())
                at.call(lambda stub: stub.Abort, abort, Deadline(PATIENCE_S))
            return write(*args)

        monkeypatch.setattr(PutsAtNode, "_write", end_one_and_write)
        store.batch_put([(name, VALUE) for name in names])
        assert store.batch_get(names) == [VALUE] * 2
