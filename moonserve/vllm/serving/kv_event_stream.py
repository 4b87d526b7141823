"""Receives the KV events that an engine publishes (ZMQ, msgpack) and passes them to `CachedBlocks`.

The format is that of `vllm/distributed/kv_events.py`, whose events are maps; older vLLM and other engines send the same
fields as arrays. Needs msgspec and pyzmq (extra `kv-events`), which vLLM has. Does not know vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import zmq
from zmq.asyncio import Context

from moonserve.vllm.serving.kv_event_state import (
    BlockHash,
    CachedBlocks,
    Change,
    Cleared,
    KvEventSource,
    Removed,
    Stored,
)

log = logging.getLogger(__name__)

# The publisher looks for requests every 0.1 s, between its batches.
REPLAY_TIMEOUT_S = 5.0
_OWN_MEMORY = (None, "GPU")  # vLLM's word on every device; others are tiers behind it


class KvEvent(msgspec.Struct, tag=True):  # type: ignore[call-arg,unused-ignore]  # mypy may lack msgspec
    """A change of a cache, tagged with its class's name."""


class BlockStored(KvEvent):
    """Consecutive blocks entered a cache. Fields are in the format's order; those that are not used are left out."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KvEvent):
    """Blocks left a cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(KvEvent):
    """The engine's cache is empty."""


_KINDS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def changes_of(payload: bytes) -> list[Change]:
    """Returns the changes that a message tells of the engine's own memory. One that cannot be read may have told
    anything, so that all blocks are forgotten."""
    try:
        _, events, *_ = msgspec.msgpack.decode(payload)  # time, events, perhaps the data-parallel rank
        return list(_changes(events))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        log.warning("KV events cannot be read, so the cached prompts are forgotten: %s", error)
        return [Cleared()]


def _changes(events: list[Any]) -> Iterator[Change]:
    for event in events:
        kind = _KINDS.get(event["type"] if isinstance(event, dict) else event[0])
        if kind is None:
            continue
        if not isinstance(event, dict):
            event = dict(zip(("type", *kind.__struct_fields__), event, strict=False))
        match msgspec.convert(event, kind):
            case BlockStored(medium=medium) as stored if medium in _OWN_MEMORY:
                yield _stored(stored)
            case BlockRemoved(medium=medium) as removed if medium in _OWN_MEMORY:
                yield Removed(hashes=tuple(removed.block_hashes), group=removed.group_idx)
            case AllBlocksCleared():
                yield Cleared()


def _stored(event: BlockStored) -> Stored:
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


async def follow_events(source: KvEventSource, blocks: CachedBlocks) -> None:
    """Follows the events until cancelled. Begins with all that the publisher remembers."""
    context = Context()
    try:
        with context.socket(zmq.SUB) as events:
            events.set_hwm(0)  # no limit: the state is small, and a gap costs more
            events.subscribe(source.topic)
            events.connect(_reachable(source.endpoint))
            while True:
                _, number, payload = await events.recv_multipart()
                seq = int.from_bytes(number, "big")
                if blocks.misses(seq) and source.replay is not None:
                    async for repeated, again in _replay(context, source.replay, blocks.next_seq):
                        blocks.apply(repeated, changes_of(again))
                blocks.apply(seq, changes_of(payload))
    finally:
        context.destroy(linger=0)


async def _replay(context: Context, endpoint: str, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
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
            log.warning("KV events were not repeated within %g s", REPLAY_TIMEOUT_S)


def _reachable(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")
