"""Inline connections to a real node: guarantees for clients, and misbehaving peers that must leave no trace."""

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import Mock

import pytest

from moonserve.kvstore.client import KvStore
from moonserve.kvstore.client.node_access import inline_protocol
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.inline_client import GET_KEYS, InlineClient
from moonserve.kvstore.client.node_access.objects import plain_key
from moonserve.kvstore.node.inline_puts import LocalWrites
from moonserve.kvstore.node.inline_server import InlineConnections
from moonserve.kvstore.node.tier_mover import TierMover
from moonserve.kvstore.state.objects import PutOutcome, PutRequest, Reservation
from moonserve.protocol import errors
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, checksum
from moonserve.protocol.pb import common_pb2
from moonserve.protocol.rpc.wire import failure_from_wire
from tests.kvstore.client.pools import TCP, fresh, own_node, store_of
from tests.kvstore.node.nodes import Node
from tests.kvstore.node.nodes import key as numbered
from tests.kvstore.state.states import Heard, make_state
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.stopping import stopped

DRAM = 16 * 2**20
VALUE = os.urandom(100_000)
FAR_AHEAD = 2.0**62
"""Deadline that never passes."""


@pytest.fixture
def store(node: Node) -> Iterator[KvStore]:
    with store_of(f"node://{node.rpc_address}", TCP) as store:
        yield store


def inline_client_of(store: KvStore) -> InlineClient:
    inline = store._cluster.view.nodes[0].attached(Deadline(PATIENCE_S)).inline
    assert inline is not None
    return inline


def link_to(store: KvStore) -> contextlib.closing[inline_protocol.InlineConnection]:
    """Opens a raw connection, for requests that a real client does not send."""
    return contextlib.closing(inline_protocol.InlineConnection(inline_client_of(store)._dial(10.0)))


def begun(key: BlockKey, *lengths: int, deadline_ms: int = 30_000) -> bytes:
    """Returns the head of a put of values under `key` and the keys after it; the values must follow."""
    keys = [BlockKey((int.from_bytes(key) + n).to_bytes(16)) for n in range(len(lengths))]
    head = inline_protocol.pack_request(inline_protocol.RequestKind.PUT, len(lengths), deadline_ms, sum(lengths))
    return head + inline_protocol.pack_put_rows(keys, [NO_PARENT] * len(lengths), lengths)


def checksums_of(*values: bytes) -> bytes:
    return b"".join(checksum([value]).to_bytes(8, "little") for value in values)


def outcomes(link: inline_protocol.InlineConnection) -> Sequence[int] | errors.MoonserveError:
    status, _, nbytes = inline_protocol.RESPONSE.unpack(
        inline_protocol.receive_exactly(link, inline_protocol.RESPONSE.size, FAR_AHEAD)
    )
    body = bytes(inline_protocol.receive_exactly(link, nbytes, FAR_AHEAD))
    if status == inline_protocol.ResponseStatus.OK:
        return body
    return failure_from_wire(common_pb2.Failure.FromString(body))


def reserved(store: KvStore) -> int:
    return store.stats().total.reserved_bytes


def until_ended(link: inline_protocol.InlineConnection) -> None:
    with pytest.raises(errors.PeerLost):
        inline_protocol.receive_exactly(link, 1, FAR_AHEAD)


def test_exists_takes_any_number_of_keys(store: KvStore) -> None:
    store.put(b"there", b"value")
    keys = [b"absent %d" % number for number in range(GET_KEYS)]
    assert store.batch_exists([*keys, b"there"]) == [False] * GET_KEYS + [True]
    assert store.batch_get([*keys, b"there"]) == [None] * GET_KEYS + [b"value"]
    segment = store.allocate(8 * (GET_KEYS + 1))
    found = store.batch_get_into([*keys, b"there"], segment, range(0, segment.nbytes, 8))
    assert found == [None] * GET_KEYS + [5]
    assert bytes(segment.buffer[8 * GET_KEYS :][:5]) == b"value"


def test_values_larger_than_a_response_are_read_with_READs(store: KvStore) -> None:
    """A batch larger than GET_BYTES is read completely, with a missing key and an empty value in it."""
    room = 700_000
    values = {**{os.urandom(8): os.urandom(room) for _ in range(9)}, b"empty": b""}
    store.batch_put(values.items())
    names = [*values, b"missing"]
    assert store.batch_get(names) == [*values.values(), None]
    segment = store.allocate(len(names) * room)
    landed = store.batch_get_into(names, segment, range(0, segment.nbytes, room))
    assert landed == [*map(len, values.values()), None]
    for place, value in enumerate(values.values()):
        assert bytes(segment.buffer[place * room :][: len(value)]) == value
    store.batch_remove(names)


def test_bytes_that_do_not_match_are_not_stored(store: KvStore) -> None:
    """A value that does not match its checksum is dropped and reported as CORRUPT; its neighbour is stored."""
    name = fresh()
    damaged, good = os.urandom(5_000), os.urandom(6_000)
    with link_to(store) as link:
        told = checksums_of(damaged[:-1] + bytes([damaged[-1] ^ 1]), good)
        inline_protocol.send(link, begun(plain_key(name), 5_000, 6_000) + damaged + good + told, FAR_AHEAD)
        assert outcomes(link) == bytes([PutOutcome.CORRUPT, PutOutcome.STORED])
    assert not store.exists(name)
    assert reserved(store) == 0


def test_a_client_gets_an_error_if_its_value_arrived_damaged(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonserve.kvstore.client.node_access.objects.checksum", lambda _: 1)
    with pytest.raises(errors.IntegrityError, match="1 of 1 values arrived damaged"):
        store.put(b"damaged", VALUE)
    assert store.get(b"damaged") is None


@pytest.mark.parametrize("nbytes", [0, 1, 50_000, 100_000, 100_007])
def test_an_interrupted_put_leaves_nothing_behind(store: KvStore, nbytes: int) -> None:
    """A put whose connection breaks before the value, in it, before its checksum or in it frees its space."""
    name, held = fresh(), store.stats().total.held_bytes
    whole = begun(plain_key(name), len(VALUE)) + VALUE + checksums_of(VALUE)
    with link_to(store) as link:
        inline_protocol.send(link, whole[: 64 + nbytes], FAR_AHEAD)
        until(lambda: reserved(store) > 0)
    until(lambda: reserved(store) == 0)
    assert not store.exists(name)
    assert store.stats().total.held_bytes == held
    store.put(name, VALUE)
    assert store.get(name) == VALUE


def test_a_writer_that_is_too_slow_loses_its_space(store: KvStore) -> None:
    """A put that misses its own deadline loses its space and its connection, so that later bytes go nowhere."""
    with link_to(store) as link:
        inline_protocol.send(link, begun(plain_key(fresh()), len(VALUE), deadline_ms=200) + VALUE[:10], FAR_AHEAD)
        until_ended(link)
    assert reserved(store) == 0


def test_the_second_of_two_writers_learns_that_the_first_stores(store: KvStore) -> None:
    key = plain_key(name := fresh())
    another = begun(key, 7) + b"another" + checksums_of(b"another")
    with link_to(store) as first, link_to(store) as second:
        inline_protocol.send(first, begun(key, len(VALUE)) + VALUE[:1_000], FAR_AHEAD)
        until(lambda: reserved(store) > 0)
        inline_protocol.send(second, another, FAR_AHEAD)
        assert outcomes(second) == bytes([PutOutcome.IN_PROGRESS])
        assert not store.exists(name)
        inline_protocol.send(first, VALUE[1_000:] + checksums_of(VALUE), FAR_AHEAD)
        assert outcomes(first) == bytes([PutOutcome.STORED])
        assert store.get(name) == VALUE
        inline_protocol.send(second, another, FAR_AHEAD)
        assert outcomes(second) == bytes([PutOutcome.PRESENT])


def test_a_second_writer_waits_for_the_first_and_takes_over_when_it_dies(store: KvStore) -> None:
    key = b"taken over"
    with link_to(store) as dying:
        inline_protocol.send(dying, begun(plain_key(key), len(VALUE)) + VALUE[:1_000], FAR_AHEAD)
        until(lambda: reserved(store) > 0)
        writer = threading.Thread(target=store.put, args=(key, VALUE))
        writer.start()
        dying.shut()
        writer.join()
    assert store.get(key) == VALUE


def test_a_refused_put_gets_the_reason_and_the_connection_stays_open(store: KvStore) -> None:
    value = b"value" + checksums_of(b"value")
    with link_to(store) as link:
        inline_protocol.send(link, begun(NO_PARENT, 5) + value, FAR_AHEAD)
        assert isinstance(outcomes(link), errors.InvalidRequest)
        inline_protocol.send(link, begun(plain_key(fresh()), 5) + value, FAR_AHEAD)
        assert outcomes(link) == bytes([PutOutcome.STORED])


@pytest.mark.parametrize(
    "question",
    [
        inline_protocol.pack_request(inline_protocol.RequestKind.PUT, 1, 1000, inline_protocol.MAX_BYTES + 1),
        inline_protocol.pack_request(inline_protocol.RequestKind.PUT, 1, 1000, 5)
        + inline_protocol.pack_put_rows([numbered(0)], [NO_PARENT], [6]),
        inline_protocol.pack_request(inline_protocol.RequestKind.PUT, 2, 1000, 4)
        + inline_protocol.pack_put_rows([numbered(0), numbered(1)], [NO_PARENT] * 2, [2**64 - 4, 8]),
    ],
    ids=["bytes", "sum", "overflow"],
)
def test_a_peer_that_violates_the_format_is_cut_off_and_the_node_serves_on(store: KvStore, question: bytes) -> None:
    with link_to(store) as link:
        inline_protocol.send(link, question, FAR_AHEAD)
        until_ended(link)
    store.put(b"still there", b"yes")
    assert store.get(b"still there") == b"yes"


def test_a_node_without_a_free_connection_is_used_over_rpcs() -> None:
    with own_node(transports=TCP) as (node, store), contextlib.ExitStack() as stack:
        store.put(b"key", VALUE)
        for _ in range(255):
            stack.enter_context(link_to(store))
        with store_of(f"node://{node.rpc_address}", TCP) as late:
            assert late.get(b"key") == VALUE
            late.put(b"other", VALUE)
            assert late.get(b"other") == VALUE


@pytest.mark.parametrize("flags", [("--transfer-rails", "127.0.0.1"), ("--transports", "shm")])
def test_a_node_with_named_rails_offers_no_inline_connections(flags: tuple[str, ...]) -> None:
    with own_node(*flags) as (_, store):
        store.put(b"key", VALUE)
        assert store.get(b"key") == VALUE
        lean = store._cluster.view.nodes[0].attached(Deadline(PATIENCE_S)).channel
        with pytest.raises(errors.MoonserveError, match="no method"):
            lean.take_over(inline_protocol.INLINE_METHOD, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("end", [Node.kill, Node.stop])
def test_a_node_that_ends_during_a_call_raises_peer_lost_at_once(end: Callable[[Node], None]) -> None:
    """The end of a node ends the connection of a put in flight, and a later get raises PeerLost without a timeout."""
    with own_node(transports=TCP) as (node, store), link_to(store) as link:
        store.put(b"key", VALUE)
        inline_protocol.send(link, begun(plain_key(fresh()), len(VALUE)) + VALUE[:1_000], FAR_AHEAD)
        until(lambda: reserved(store) > 0)
        end(node)
        until_ended(link)
        with pytest.raises(errors.PeerLost):
            store.get(b"key", timeout_s=NEVER_S)


def test_calls_of_a_stopped_node_fail_within_the_time_given(node: Node, store: KvStore) -> None:
    store.put(b"key", VALUE)
    inline, slots = inline_client_of(store), BufferSlots.packed(store.allocate(100), [100])
    with stopped(node.process.pid):
        with pytest.raises(errors.DeadlineExceeded):
            inline.get([plain_key(fresh())], slots, Deadline(0.3))
        for call in (
            lambda: store.get(b"key", timeout_s=0.5),
            lambda: store.put(b"new", b"value", timeout_s=0.5),
            lambda: store.remove(b"key", timeout_s=0.5),
        ):
            with pytest.raises((errors.PeerLost, errors.DeadlineExceeded)):
                call()
    until(lambda: not any(each.resting for each in store.nodes()))
    assert store.get(b"key") == VALUE


def test_a_connection_without_a_thread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    door = InlineConnections(lambda link: None, max_connections=1)
    ours, theirs = socket.socketpair()
    with theirs:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
            door.take_over(ours)
        assert theirs.recv(1) == b""
        door.admit()
        door.close()


def test_local_writes_become_visible_or_are_aborted_and_never_expire() -> None:
    capacity = 16 * 1024
    state, clock = make_state(capacity, Heard()), itertools.count()
    calls: list[str] = []
    refused = [errors.Overloaded("draining", retry_after_s=1.0)]

    def admit() -> None:
        if refused:
            raise refused.pop()

    writes = LocalWrites(
        state,
        TierMover(state, memoryview(bytearray(capacity)), lambda: None),
        lambda: float(next(clock)),
        admit=admit,
        changed=lambda: calls.append("changed"),
        ended=lambda: calls.append("ended"),
    )

    def begun(*numbers: int) -> Reservation:
        reservation = writes.reserve([PutRequest(key=numbered(n), parent=None, length=100) for n in numbers])
        assert reservation is not None
        assert state.expire(1e12) == []
        state.validate()
        return reservation

    with pytest.raises(errors.Overloaded):
        begun(1)
    free = state.catalog.usage().free_bytes
    first, second = begun(1, 2), begun(1, 3)
    assert [slot.outcome for slot in second.slots] == [PutOutcome.IN_PROGRESS, PutOutcome.GRANTED]
    third = begun(2)
    writes.abort(third)  # it had no grants
    writes.abort(second)
    writes.commit(first, {numbered(1): 7, numbered(2): 7}, [numbered(2)])
    state.validate()
    assert state.catalog.present([numbered(n) for n in (1, 2, 3)]) == [True, False, False]
    assert state.catalog.usage().free_bytes == free - state.catalog.usage().held_bytes
    assert calls == ["changed"] * 3 + ["ended"] * 2
