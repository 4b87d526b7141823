"""A client whose keys others are writing: it waits for each of them, and blames no node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client import KvStore, plain_key, puts
from kvstore.client.deadline import Deadline
from kvstore.client.puts import Puts
from kvstore.promises import Outcome
from protocol.errors import DeadlineExceeded
from protocol.pb import kvstore_pb2
from tests.kvstore.client.pools import DRAM, store_of
from tests.kvstore.nodes import Node, running_node
from tests.patience import PATIENCE_S

BLOCK = 64 * 1024


@pytest.fixture
def node() -> Iterator[Node]:
    """What stays reserved in it is nobody else's concern."""
    with running_node("--dram", str(DRAM)) as node:
        yield node


def begin_to_write(store: KvStore, name: bytes) -> None:
    """As another writer, whose reservation has the key's name."""
    [at] = store._cluster.view.nodes
    request = kvstore_pb2.StoreReserveRequest(reservation_id=name.decode(), ttl_s=60.0)
    request.wishes.add(key=plain_key(name), length=BLOCK)
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
    """Also when the key of one of them is free before the others have ended."""
    names, value = [b"given up", b"still written"], os.urandom(BLOCK)
    with store_of(f"node://{node.rpc_address}") as store:
        [at] = store._cluster.view.nodes
        for name in names:
            begin_to_write(store, name)
        waited_for = iter(names)
        write = Puts._write

        def end_one_and_write(*args: Any) -> bool:
            if args[-1] is Outcome.IN_PROGRESS and args[-1] in args[-2]:
                abort = kvstore_pb2.StoreAbortRequest(reservation_id=next(waited_for).decode())
                at.call(lambda stub: stub.Abort, abort, Deadline(PATIENCE_S))
            return write(*args)

        monkeypatch.setattr(Puts, "_write", end_one_and_write)
        store.batch_put([(name, value) for name in names])
        assert store.batch_get(names) == [value] * 2
