"""RPCs of a node whose effect outlasts its process: removals, pins, draining.

A part of `kvstore.service`, which owns the state used here. Removals of all replicas go through `kvstore.remembering`;
a removal of this node's replica only reaches its own disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from kvstore import wire
from kvstore.disk.files import sync_folder
from kvstore.mover import Mover
from kvstore.remembering import Remembering
from kvstore.state import StoreState
from protocol.keys import pack_keys
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc

FILE_NAME = "draining"


class DrainMark:
    """Persistent mark that a node is draining: an empty file in its folder. Without a folder, a restart clears it."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE_NAME if folder is not None else None
        self._turn = asyncio.Lock()  # the last request wins

    def is_set(self) -> bool:
        """Returns True if the mark is set. Blocks on the file system."""
        return self._path is not None and self._path.exists()

    async def keep(self, draining: bool) -> None:
        """Writes the mark durably. A failure is only logged; a restart then has the old mark."""
        async with self._turn:
            try:
                await asyncio.to_thread(self._write, draining)
            except OSError as error:
                log.error("a restart will not know whether this node is draining: %s", error)

    def _write(self, draining: bool) -> None:
        if self._path is None:
            return
        if draining:
            self._path.touch()
        else:
            self._path.unlink(missing_ok=True)
        sync_folder(self._path.parent)


log = logging.getLogger(__name__)

REMOVALS_PER_MESSAGE = 20_000
"""Limit of removals per reply: about 640 KB."""

Context = grpc.aio.ServicerContext[Any, Any]


class LastingCalls(kvstore_pb2_grpc.KvStoreServicer):
    """Base class of the service, which sets the attributes declared here."""

    mover: Mover
    remembering: Remembering
    draining: bool
    _state: StoreState
    _drain_mark: DrainMark
    _changed: Callable[[], None]
    _clock: Callable[[], float]

    async def Remove(self, request: kvstore_pb2.StoreRemoveRequest, context: Context) -> kvstore_pb2.StoreRemoveReply:
        keys = wire.keys_from_wire(request.keys)
        if request.removal_id:
            removed = await self.remembering.remove(keys, request.removal_id)
            return kvstore_pb2.StoreRemoveReply(removed=removed)
        gone = self._state.remove(keys, corrupt=request.corrupt, keep_pinned=request.keep_pinned)
        if request.corrupt and gone:
            log.error("a reader found %d of %d objects corrupt; dropped", len(gone), len(keys))
        self._changed()
        forgotten = [about.key for about in gone] if request.keep_pinned else keys
        await self.mover.forget(dict.fromkeys(forgotten, self._state.catalog.latest_generation))
        return kvstore_pb2.StoreRemoveReply(removed=len(gone))

    async def Removals(
        self, request: kvstore_pb2.StoreRemovalsRequest, context: Context
    ) -> kvstore_pb2.StoreRemovalsReply:
        removals, now = self.remembering.removals, self._clock()
        reply = kvstore_pb2.StoreRemovalsReply(
            life=removals.life,
            covered_s=removals.covered_s(now),
            settled=self.remembering.settled,
        )
        if request.keys:
            for key in wire.keys_from_wire(request.keys):
                reply.ids.append(removals.last(key))
                reply.ages_s.append(removals.age_s(key, now))
            return reply
        next_seq = request.next_seq if request.life == removals.life else 1
        page = removals.tell(next_seq, REMOVALS_PER_MESSAGE, now)
        reply.next_seq, reply.more = page.next_seq, page.more
        reply.keys = pack_keys([each.key for each in page.heard])
        reply.ids.extend(each.removal_id for each in page.heard)
        reply.ages_s.extend(each.age_s for each in page.heard)
        return reply

    async def Pin(self, request: kvstore_pb2.StorePinRequest, context: Context) -> kvstore_pb2.StorePinReply:
        keys = wire.keys_from_wire(request.keys)
        pinned = self._state.pin(keys, wire.pin_from_wire(request.pin))
        await self.mover.keep_pins(keys)
        return kvstore_pb2.StorePinReply(pinned=pinned)

    async def GetPins(
        self, request: kvstore_pb2.StoreGetPinsRequest, context: Context
    ) -> kvstore_pb2.StoreGetPinsReply:
        pins = self._state.pins(wire.keys_from_wire(request.keys))
        return kvstore_pb2.StoreGetPinsReply(pins=map(wire.pin_to_wire, pins))

    async def SetDraining(
        self, request: kvstore_pb2.StoreSetDrainingRequest, context: Context
    ) -> kvstore_pb2.StoreSetDrainingReply:
        self.draining = request.draining
        log.info("draining" if request.draining else "accepting objects again")
        await self._drain_mark.keep(request.draining)
        return kvstore_pb2.StoreSetDrainingReply()
