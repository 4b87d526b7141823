"""How a node's events reach one follower: an inventory where the log does not go back far enough, then the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvstore.event_log import Event, EventLog, Follower
from kvstore.state import StoreState
from kvstore.stored import Tier
from protocol.keys import NO_PARENT, BlockKey, pack_keys
from protocol.pb import kvstore_pb2
from protocol.timer import set_within

# About 1.5 MiB on the wire.
EVENTS_PER_MESSAGE = 40_000
# Waiting a little after the first change gathers the changes of a moment into one message.
GATHER_S = 0.02
# A follower learns this often that the node lives, and what was read.
IDLE_S = 1.0

_TIERS = {
    Tier.MEMORY: kvstore_pb2.STORE_TIER_MEMORY,
    Tier.DISK: kvstore_pb2.STORE_TIER_DISK,
}


async def follow(
    log: EventLog, state: StoreState, epoch: int, request: kvstore_pb2.StoreSubscribeRequest
) -> AsyncIterator[kvstore_pb2.StoreEvents]:
    """The messages for one caller, until it goes away or the log is closed."""
    follower = log.follow(request.next_seq if request.epoch == epoch else 0)
    woken = asyncio.Event()
    follower.wake = woken.set
    try:
        while not log.closed:
            woken.clear()
            if log.missed(follower):
                async for message in _inventory(log, state, epoch, follower):
                    yield message
                continue  # it may have taken so long that the log has gone on without it
            events = changes(log, epoch, follower)
            yield events
            if follower.next_seq == log.next_seq:
                await _wait(woken)
    finally:
        log.leave(follower)


async def _inventory(
    log: EventLog, state: StoreState, epoch: int, follower: Follower
) -> AsyncIterator[kvstore_pb2.StoreEvents]:
    """Everything, in pieces. What changes meanwhile is in the log, whose replay the receiver can bear."""
    follower.next_seq = log.next_seq
    first = True
    found: list[Event] = []
    for stored in state.objects():
        found.append(Event(stored.key, stored.parent, stored.tier))
        if len(found) == EVENTS_PER_MESSAGE:
            yield message_of(epoch, follower.next_seq, found, snapshot=first, more=True)
            first, found = False, []
            await asyncio.sleep(0)
    yield message_of(epoch, follower.next_seq, found, snapshot=first, more=False)


def changes(log: EventLog, epoch: int, follower: Follower) -> kvstore_pb2.StoreEvents:
    first_seq = follower.next_seq
    events = log.take(follower, EVENTS_PER_MESSAGE)
    message = message_of(epoch, first_seq, events, snapshot=False, more=False)
    message.next_seq = follower.next_seq
    message.read_keys = log.take_reads(follower)
    return message


def message_of(
    epoch: int, first_seq: int, events: Sequence[Event], *, snapshot: bool, more: bool
) -> kvstore_pb2.StoreEvents:
    """The last event of each key says what is so; a message lists what is there and what has gone apart."""
    latest: dict[BlockKey, Event] = {}
    parents: dict[BlockKey, BlockKey] = {}
    for event in events:
        latest[event.key] = event
        if event.parent is not None:
            parents[event.key] = event.parent
        elif event.tier is None:
            parents.pop(event.key, None)
    present = [event for event in latest.values() if event.tier is not None]
    return kvstore_pb2.StoreEvents(
        epoch=epoch,
        first_seq=first_seq,
        next_seq=first_seq,
        snapshot=snapshot,
        more=more,
        added_keys=pack_keys([event.key for event in present]),
        added_parents=pack_keys([parents.get(event.key, NO_PARENT) for event in present]),
        added_tiers=bytes(_TIERS[event.tier] for event in present if event.tier),
        removed_keys=pack_keys([key for key, event in latest.items() if event.tier is None]),
    )


async def _wait(woken: asyncio.Event) -> None:
    if await set_within(woken, IDLE_S):
        await asyncio.sleep(GATHER_S)
