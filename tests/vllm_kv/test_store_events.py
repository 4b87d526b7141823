"""A node publishes its blocks as KV events, which a router can follow from any moment."""

from typing import Any

import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import connect, plain_key
from moonserve.protocol.kv_blocks import NO_PARENT, pack_keys
from moonserve.protocol.membership.kv_event_publisher import KeptBatches, events_of
from moonserve.protocol.pb import kvstore_pb2
from tests.kvstore.node.nodes import TOKEN, running_node
from tests.kvstore.state.tiered import keys
from tests.patience import PATIENCE_S

_MEDIUM = {"medium": "STORAGE", "locality": "REMOTE"}


def test_changes_become_events_with_one_for_each_chain() -> None:
    a, b, c, d = keys(1, 2, 3, 4)
    message = kvstore_pb2.StoreEvents(
        snapshot=True, added_keys=pack_keys([a, b, d]), added_parents=pack_keys([NO_PARENT, a, c]), removed_keys=c
    )
    cleared, first, second, removed = events_of(message)
    assert cleared == {"type": "AllBlocksCleared"}
    assert (first["block_hashes"], first["parent_block_hash"], first["medium"]) == ([a, b], None, "STORAGE")
    assert (second["block_hashes"], second["parent_block_hash"], second["token_ids"]) == ([d], c, [])
    assert removed == {"type": "BlockRemoved", "block_hashes": [c], **_MEDIUM}
    assert events_of(kvstore_pb2.StoreEvents(read_keys=a)) == []


def test_batches_that_are_no_longer_kept_are_replaced_by_the_present_blocks() -> None:
    batches = KeptBatches(kept_bytes=2)
    assert [batches.add(payload) for payload in (b"a", b"b", b"c")] == [0, 1, 2]
    assert batches.since(1, lambda: b"all") == [(1, b"b"), (2, b"c")]
    assert batches.since(0, lambda: b"all") == [(0, b"all"), (1, b"b"), (2, b"c")]
    assert batches.since(3, lambda: b"all") == []


def test_a_follower_of_a_node_hears_of_additions_and_removals_and_can_ask_for_earlier_ones() -> None:
    msgspec = pytest.importorskip("msgspec", reason="the extra kv-events is not installed")
    zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")
    ports = [free_port(), free_port()]
    flags = [f"tcp://127.0.0.1:{port}" for port in ports]
    with (
        running_node("--dram", "8MiB", "--kv-events", flags[0], "--kv-events-replay", flags[1]) as node,
        connect(f"node://{node.rpc_address}", cluster_token=TOKEN) as store,
        zmq.Context() as context,
        context.socket(zmq.SUB) as events,
        context.socket(zmq.DEALER) as replay,
    ):

        def received(socket: Any) -> tuple[int, list[dict[str, Any]]]:
            assert socket.poll(PATIENCE_S * 1000), "nothing was published"
            *_, number, payload = socket.recv_multipart()
            seq = int.from_bytes(number, "big", signed=True)
            return seq, msgspec.msgpack.decode(payload)[1] if payload else []

        store.put(b"before", b"1")
        replay.connect(flags[1])
        seen: list[dict[str, Any]] = []
        while not any(plain_key(b"before") in each.get("block_hashes", ()) for each in seen):
            replay.send_multipart((b"", (0).to_bytes(8, "big")))
            while (batch := received(replay))[0] >= 0:
                seen += batch[1]
        events.subscribe(b"")
        events.connect(flags[0])
        number = 0
        while not events.poll(50):  # a subscription takes effect at some time
            store.put(f"{number}".encode(), b"1")
            number += 1
        store.remove(b"before")
        while {"type": "BlockRemoved", "block_hashes": [plain_key(b"before")], **_MEDIUM} not in received(events)[1]:
            pass
