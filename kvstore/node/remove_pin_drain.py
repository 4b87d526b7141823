"""RPCs of a node whose effect outlasts its process: removals, pins, draining.

A part of `kvstore.node.service`, which owns the state used here. Removals of all replicas go through
`kvstore.node.removal_store`; a removal of this node's replica only reaches its own disk.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from moonserve.kvstore import wire
from moonserve.kvstore.disk.io.segment_file import sync_folder
from moonserve.kvstore.node.removal_store import RemovalStore
from moonserve.kvstore.node.tier_mover import TierMover
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import pack_keys
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Context

DRAINING_FILE_NAME = "draining"


class DrainMark:
    """Persistent mark that a node is draining: an empty file in its folder. Without a folder, a restart clears it."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / DRAINING_FILE_NAME if folder is not None else None
        self._turn = asyncio.Lock()  # the last request wins

    def is_set(self) -> bool:
        """Returns True if the mark is set. Blocks on the file system."""
        return self._path is not None and self._path.exists()

    async def save(self, draining: bool) -> None:
        """Writes the mark durably. A failure is only logged; a restart then has the old mark."""
        async with self._turn:
            try:
                await asyncio.to_thread(self._write, draining)
            except OSError as error:
                log.error("the drain mark cannot be saved, so a restart may forget it: %s", error)

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


class DurableCalls(kvstore_pb2_grpc.KvStoreServicer):
    """Base class of the service, which sets the attributes declared here."""

    mover: TierMover
    removal_store: RemovalStore
    draining: bool
    _state: StoreState
    _drain_mark: DrainMark
    _on_change: Callable[[], None]
    _clock: Callable[[], float]

    async def Remove(self, request: kvstore_pb2.StoreRemoveRequest, context: Context) -> kvstore_pb2.StoreRemoveReply:
        keys = wire.keys_from_wire(request.keys)
        if request.removal_id:
            removed = await self.removal_store.remove(keys, request.removal_id)
            return kvstore_pb2.StoreRemoveReply(removed=removed)
        gone = self._state.remove(keys, corrupt=request.corrupt, keep_pinned=request.keep_pinned)
        if request.corrupt and gone:
            log.error("a reader found %d of %d objects corrupt; dropped", len(gone), len(keys))
        self._on_change()
        forgotten = [about.key for about in gone] if request.keep_pinned else keys
        await self.mover.forget(dict.fromkeys(forgotten, self._state.catalog.latest_generation))
        return kvstore_pb2.StoreRemoveReply(removed=len(gone))

    async def Removals(
        self, request: kvstore_pb2.StoreRemovalsRequest, context: Context
    ) -> kvstore_pb2.StoreRemovalsReply:
        removals, now = self.removal_store.removals, self._clock()
        reply = kvstore_pb2.StoreRemovalsReply(
            life=removals.life,
            covered_s=removals.covered_s(now),
            settled=self.removal_store.settled,
        )
        if request.keys:
            for key in wire.keys_from_wire(request.keys):
                reply.ids.append(removals.last_id(key))
                reply.ages_s.append(removals.age_s(key, now))
            return reply
        next_seq = request.next_seq if request.life == removals.life else 1
        page = removals.page_from(next_seq, REMOVALS_PER_MESSAGE, now)
        reply.next_seq, reply.more = page.next_seq, page.more
        reply.keys = pack_keys([each.key for each in page.removals])
        reply.ids.extend(each.removal_id for each in page.removals)
        reply.ages_s.extend(each.age_s for each in page.removals)
        return reply

    async def Pin(self, request: kvstore_pb2.StorePinRequest, context: Context) -> kvstore_pb2.StorePinReply:
        keys = wire.keys_from_wire(request.keys)
        pinned = self._state.pin(keys, wire.pin_from_wire(request.pin))
        await self.mover.save_pins(keys)
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
        await self._drain_mark.save(request.draining)
        return kvstore_pb2.StoreSetDrainingReply()
