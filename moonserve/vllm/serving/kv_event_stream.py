"""Receives the KV events that vLLM publishes (ZMQ, msgpack) and passes them to `CachedBlocks`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from moonserve.vllm.serving.kv_event_state import CachedBlocks, Change, Cleared, Removed, Stored

log = logging.getLogger(__name__)

# The publisher looks for requests every 0.1 s, between its batches.
REPLAY_TIMEOUT_S = 5.0


async def follow_events(config: KVEventsConfig, blocks: CachedBlocks) -> None:
    """Follows the events until cancelled. Begins with all that the publisher remembers."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.SUB) as events:
            events.set_hwm(0)  # no limit: the state is small, and a gap costs more
            events.subscribe(config.topic)
            events.connect(_reachable(config.endpoint))
            while True:
                _, number, payload = await events.recv_multipart()
                seq = int.from_bytes(number, "big")
                if blocks.misses(seq) and config.replay_endpoint is not None:
                    async for repeated, again in _replay(context, config.replay_endpoint, blocks.next_seq):
                        blocks.apply(repeated, _changes(decoder.decode(again)))
                blocks.apply(seq, _changes(decoder.decode(payload)))
    finally:
        context.destroy(linger=0)


async def _replay(context: zmq.asyncio.Context, endpoint: str, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yields the batches from number `start` on that the publisher remembers."""
    with context.socket(zmq.DEALER) as replay:
        replay.connect(_reachable(endpoint))
        await replay.send_multipart((b"", start.to_bytes(8, "big")))
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                while True:
                    *_, number, payload = await replay.recv_multipart()
                    seq = int.from_bytes(number, "big", signed=True)
                    if seq < 0:
                        return
                    yield seq, payload
        except TimeoutError:
            log.warning("vLLM did not repeat its KV events within %g s", REPLAY_TIMEOUT_S)


def _reachable(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def _changes(batch: KVEventBatch) -> Iterator[Change]:
    for event in batch.events:
        match event:
            case BlockStored():
                yield _stored(event)
            case BlockRemoved():
                yield Removed(hashes=tuple(event.block_hashes), group=event.group_idx)
            case AllBlocksCleared():
                yield Cleared()


def _stored(event: Any) -> Stored:
    extras = [value for each in event.extra_keys or () for value in each or ()]
    salt = extras[0] if extras and isinstance(extras[0], str) else ""
    is_salted_only = extras in ([], [salt])
    return Stored(
        hashes=tuple(event.block_hashes),
        parent=event.parent_block_hash,
        token_ids=tuple(event.token_ids),
        block_size=event.block_size,
        salt=salt,
        is_foreign=not is_salted_only or event.lora_id is not None or event.kv_cache_spec_sliding_window is not None,
        group=event.group_idx,
    )
