"""KV events in vLLM's format, as maps and as arrays, reach the state; those of other tiers do not."""

import asyncio
from typing import Any

import pytest

from moonserve.protocol.kv_blocks import BlockKey, block_keys, root_key
from moonserve.vllm.serving.kv_event_state import CachedBlocks, Cleared, KvEventSource, Removed, Stored
from tests.patience import PATIENCE_S, came_true

msgspec = pytest.importorskip("msgspec", reason="the extra kv-events is not installed")
zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")

from moonserve.vllm.serving.kv_event_stream import changes_of, follow_events  # noqa: E402 - needs the extra

_STORED = {"block_hashes": [b"a", b"b"], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2}
_EXPECTED = Stored(hashes=(b"a", b"b"), parent=None, token_ids=(1, 2, 3, 4), block_size=2)


def _payload(*events: Any) -> bytes:
    payload: bytes = msgspec.msgpack.encode([1.5, list(events), 0])
    return payload


def _map(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def test_events_are_read_as_maps_and_as_arrays() -> None:
    assert changes_of(_payload(_map("BlockStored", **_STORED, medium="GPU"))) == [_EXPECTED]
    assert changes_of(_payload(["BlockStored", *_STORED.values(), None])) == [_EXPECTED]
    assert changes_of(_payload(["BlockRemoved", [7]], ["AllBlocksCleared"])) == [Removed(hashes=(7,)), Cleared()]


def test_other_tiers_and_unknown_events_are_left_out() -> None:
    events = [_map("BlockStored", **_STORED, medium="store"), _map("BlockRemoved", block_hashes=[b"a"], medium="CPU")]
    assert changes_of(_payload(*events, _map("BlockMoved", block_hashes=[b"a"]))) == []


@pytest.mark.parametrize(
    ("fields", "is_foreign", "salt"),
    [
        ({"extra_keys": [["salt"], None]}, False, "salt"),
        ({"extra_keys": [["image", 3], None]}, True, "image"),
        ({"lora_id": 1}, True, ""),
        ({"kv_cache_spec_sliding_window": 128}, True, ""),
    ],
)
def test_blocks_that_keys_do_not_cover_are_marked(fields: dict[str, Any], is_foreign: bool, salt: str) -> None:
    [stored] = changes_of(_payload(_map("BlockStored", **_STORED, **fields)))
    assert isinstance(stored, Stored)
    assert (stored.is_foreign, stored.salt) == (is_foreign, salt)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", _payload({}), _payload(_map("BlockStored", block_hashes=3)), _payload(3)]
)
def test_a_message_that_cannot_be_read_forgets_everything(payload: bytes) -> None:
    assert changes_of(payload) == [Cleared()]


async def test_a_late_follower_asks_for_what_it_has_missed() -> None:
    root, found = root_key("f"), dict[BlockKey, BlockKey | None]()
    blocks = CachedBlocks(root, 2, found.__setitem__, found.__delitem__)
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as events, context.socket(zmq.ROUTER) as replay:
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (events, replay)]
        endpoints = [f"tcp://*:{port}" for port in ports]
        source = KvEventSource(endpoint=endpoints[0], replay=endpoints[1])
        following = asyncio.create_task(follow_events(source, blocks))
        second = _map("BlockStored", block_hashes=[b"c"], parent_block_hash=b"b", token_ids=[5, 6], block_size=2)
        asked = asyncio.ensure_future(replay.recv_multipart())
        async with asyncio.timeout(PATIENCE_S):
            while not asked.done():  # a subscription takes effect at some time
                await events.send_multipart([b"", (1).to_bytes(8, "big"), _payload(second)])
                await asyncio.wait({asked}, timeout=0.05)
            client, _, start = asked.result()
            assert int.from_bytes(start, "big") == 0
            first = _payload(_map("BlockStored", **_STORED))
            await replay.send_multipart([client, b"", b"", (0).to_bytes(8, "big"), first])
            await replay.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])
            await came_true(lambda: len(found) >= 3)
        following.cancel()
        await asyncio.wait({following})
    assert list(found) == block_keys(root, (1, 2, 3, 4, 5, 6), 2)
