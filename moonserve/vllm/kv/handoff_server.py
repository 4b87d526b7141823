"""Serves the KV of finished prompts to decode servers, which READ it from this worker's memory.

The blocks are hashed as soon as a prompt is computed. A reader renews its lease while its request waits; a prompt whose
reader is silent for the length of a lease is given up. Runs in an event loop of its own; owns no KV memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from moonserve.kvstore.client.node_access.background import BackgroundLoop
from moonserve.protocol.errors import Incompatible, MoonserveError
from moonserve.protocol.pb import handoff_pb2
from moonserve.protocol.rpc.socket_server import SocketServer
from moonserve.transfer import TransferEngine
from moonserve.vllm.kv.cache_groups import CacheGroup
from moonserve.vllm.kv.handoff_state import HeldPrompts
from moonserve.vllm.kv.kv_memory import KvMemory
from moonserve.vllm.kv.step_plan import Offer

log = logging.getLogger(__name__)

_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Prompt:
    pin_id: int
    location: handoff_pb2.HandoffLocation
    lent: contextlib.ExitStack
    """Keeps the blocks where the location says."""


class HandoffServer:
    """Thread-safe. `start` it, and `close` it before the transfer engine."""

    def __init__(
        self, engine: TransferEngine, groups: list[CacheGroup], namespace: str, cluster_token: str, lease_s: float
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._namespace = namespace
        self._lease_s = lease_s
        self._held: HeldPrompts[_Prompt] = HeldPrompts(lease_s)
        self._ended: deque[int] = deque()
        self._changed = asyncio.Condition()
        self._server = SocketServer(cluster_token)
        self._server.add("KvHandoff", self)
        self._loop = BackgroundLoop()
        self._num_expired = 0

    def start(self) -> str:
        """Listens and returns the address for decode servers."""
        address, _ = self._loop.run(self._server.start(self._engine.options.host), _STOP_S)
        self._loop.start(self._expire())
        return address

    def close(self) -> None:
        self._loop.run(self._server.stop(0.0), _STOP_S)
        self._loop.close()

    def offer(self, offer: Offer, memory: KvMemory) -> None:
        """Holds a prompt whose blocks are computed and pinned."""
        self._loop.start(self._hold(offer, memory))

    def withdraw(self, request_ids: list[str]) -> None:
        self._loop.start(self._end(request_ids))

    def take_ended(self) -> list[int]:
        """Returns the pins that are no longer needed."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def take_num_expired(self) -> int:
        """Returns how many prompts were given up since the last call."""
        count, self._num_expired = self._num_expired, 0
        return count

    # The service

    async def Locate(self, request: Any, context: object) -> handoff_pb2.HandoffLocation:
        if request.namespace != self._namespace:
            raise Incompatible(
                "the prefill server's KV means something else: model, revision, dtype, block size, parallelism and "
                "vLLM's version must be the same on both sides"
            )
        async with self._changed:
            while (prompt := self._held.renewed(request.request_id, time.monotonic())) is None:
                await self._changed.wait()
        return prompt.location

    async def Renew(self, request: Any, context: object) -> handoff_pb2.RenewHandoffReply:
        return handoff_pb2.RenewHandoffReply(unknown=[each for each in request.request_ids if not self._renewed(each)])

    async def Release(self, request: Any, context: object) -> handoff_pb2.ReleaseHandoffReply:
        await self._end(list(request.request_ids))
        return handoff_pb2.ReleaseHandoffReply()

    def _renewed(self, request_id: str) -> bool:
        try:
            return self._held.renewed(request_id, time.monotonic()) is not None
        except MoonserveError:
            return False

    async def _hold(self, offer: Offer, memory: KvMemory) -> None:
        try:
            prompt = await asyncio.to_thread(self._lend, offer, memory)
        except Exception:  # for example no memory to copy to; the decode server computes the prompt
            log.exception("request %s: its KV cannot be handed off", offer.request_id)
            self._ended.append(offer.pin_id)
            await self._end([offer.request_id])
            return
        async with self._changed:
            if not self._held.hold(offer.request_id, prompt, time.monotonic()):
                self._give_up(prompt)
            self._changed.notify_all()

    def _lend(self, offer: Offer, memory: KvMemory) -> _Prompt:
        location = handoff_pb2.HandoffLocation(transfer_address=self._engine.address, num_tokens=offer.num_tokens)
        with contextlib.ExitStack() as stack:
            for group, blocks in zip(self._groups, offer.groups, strict=True):
                if not blocks.places:
                    location.groups.add()
                    continue
                slots = stack.enter_context(memory.reading(group, blocks.block_ids))
                location.groups.add(
                    places=blocks.places,
                    segment_id=slots.segment.segment_id,
                    offsets=slots.offsets.astype("<u8").tobytes(),
                    checksums=[slots.checksum(place) for place in range(len(blocks.places))],
                )
            return _Prompt(offer.pin_id, location, stack.pop_all())

    def _give_up(self, prompt: _Prompt) -> None:
        prompt.lent.close()
        self._ended.append(prompt.pin_id)

    async def _end(self, request_ids: list[str]) -> None:
        async with self._changed:
            for prompt in self._held.end(request_ids):
                self._give_up(prompt)
            self._changed.notify_all()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 10)
            overdue = self._held.overdue(time.monotonic())
            for request_id in overdue:
                log.warning("request %s: its KV was not fetched within %.0f s", request_id, self._lease_s)
            self._num_expired += len(overdue)
            await self._end(overdue)
