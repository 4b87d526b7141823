"""Publishes a store node's blocks as KV events in vLLM's format (ZMQ, msgpack), for routers of other projects.

A block is named by its key. A node does not know tokens: `MoonserveConnector` publishes those of a block under the same
name. Batches are numbered from 0. The replay endpoint repeats them, as vLLM's does; in place of batches that are no
longer kept it sends the present blocks. ZMQ sockets are neither authenticated nor encrypted. Needs the extra
`kv-events`.
"""

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, iter_keys
from moonserve.protocol.membership.heartbeats import Inventory
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.event_loop import background_task

KEPT_BYTES = 16 * 2**20
_MEDIUM = {"medium": "STORAGE", "locality": "REMOTE"}  # vLLM's words for a store that servers share
_CLEARED = {"type": "AllBlocksCleared"}
_END = (-1).to_bytes(8, "big", signed=True)


class KeptBatches:
    """Numbers batches, and keeps the last ones."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.next_seq = 0
        self._kept_bytes = kept_bytes
        self._num_bytes = 0
        self._kept: deque[bytes] = deque()

    def add(self, payload: bytes) -> int:
        """Returns the batch's number."""
        self._kept.append(payload)
        self._num_bytes += len(payload)
        while self._num_bytes > self._kept_bytes and len(self._kept) > 1:
            self._num_bytes -= len(self._kept.popleft())
        self.next_seq += 1
        return self.next_seq - 1

    def since(self, start: int, present: Callable[[], bytes]) -> list[tuple[int, bytes]]:
        """Returns the batches from number `start` on. `present` makes a batch of all present blocks; changes that are
        repeated after it lead to the same blocks again."""
        first = self.next_seq - len(self._kept)
        found = [(first + place, payload) for place, payload in enumerate(self._kept) if first + place >= start]
        return [(first - 1, present()), *found] if start < first else found


def events_of(message: kvstore_pb2.StoreEvents) -> list[dict[str, Any]]:
    """Returns a message's changes as events."""
    events = [_CLEARED] if message.snapshot else []
    events += _stored(zip(iter_keys(message.added_keys), iter_keys(message.added_parents), strict=True))
    removed = list(iter_keys(message.removed_keys))
    return [*events, {"type": "BlockRemoved", "block_hashes": removed, **_MEDIUM}] if removed else events


def _stored(blocks: Iterable[tuple[BlockKey, BlockKey]]) -> list[dict[str, Any]]:
    """Returns one event for each run of blocks that follow each other in a chain."""
    events: list[dict[str, Any]] = []
    for key, parent in blocks:
        if events and events[-1]["block_hashes"][-1] == parent:
            events[-1]["block_hashes"].append(key)
            continue
        unknown = {"token_ids": [], "block_size": 0, "lora_id": None, "lora_name": None}
        before = None if parent == NO_PARENT else parent
        events.append({"type": "BlockStored", "block_hashes": [key], "parent_block_hash": before, **unknown, **_MEDIUM})
    return events


async def publish(
    endpoint: str, replay: str | None, messages: AsyncIterator[kvstore_pb2.StoreEvents], inventory: Inventory
) -> None:
    """Publishes messages until they end. `endpoint` and `replay`: to bind, as tcp://*:5557. Raises ConfigError."""
    try:
        import msgspec
        import zmq
        from zmq.asyncio import Context
    except ImportError as error:
        raise ConfigError(f"--kv-events needs {error.name}: pip install 'moonserve[kv-events]'") from error

    def encoded(events: list[dict[str, Any]]) -> bytes:
        payload: bytes = msgspec.msgpack.encode([time.time(), events])
        return payload

    batches = KeptBatches()

    async def repeat(replays: Any) -> None:
        while True:
            client, *_, start = await replays.recv_multipart()
            wanted = batches.since(int.from_bytes(start, "big"), lambda: encoded([_CLEARED, *_stored(inventory())]))
            for seq, payload in wanted:
                await replays.send_multipart((client, b"", b"", seq.to_bytes(8, "big"), payload))
            await replays.send_multipart((client, b"", b"", _END, b""))

    with Context() as context, contextlib.ExitStack() as sockets:
        events, replays = (sockets.enter_context(context.socket(kind)) for kind in (zmq.PUB, zmq.ROUTER))
        events.linger = replays.linger = 0
        try:
            events.bind(endpoint)
            if replay is not None:
                replays.bind(replay)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-events {endpoint}, --kv-events-replay {replay}: {error}") from error
        async with background_task(repeat(replays)):
            async for message in messages:
                if changes := events_of(message):
                    payload = encoded(changes)
                    await events.send_multipart((b"", batches.add(payload).to_bytes(8, "big"), payload))
