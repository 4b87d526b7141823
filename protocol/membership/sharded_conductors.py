"""Client of several active conductors, each of which places requests on its own share of the instances.

A placement goes to the shard of its prompt (`protocol.membership.shards`), and to the next one if that is lost, silent
or has no worker; whoever asked sees one conductor. An instance registers at the shard of its name and moves where it is
told to. Summaries, which name capacities and hot prefixes, are as old as `SUMMARY_AGE_S`. Calls are safe to repeat: a
placement that nobody uses is dropped by heartbeats.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from moonserve.protocol.errors import MoonserveError, NoWorker, PeerLost
from moonserve.protocol.kv_blocks import unpack_keys
from moonserve.protocol.membership.shards import HotPrefixes, Shard, in_order, merged_hot, routing_key
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels

log = logging.getLogger(__name__)

Stub: TypeAlias = "conductor_pb2_grpc.ConductorAsyncStub"
Method: TypeAlias = Callable[[Stub], Callable[..., Awaitable[Any]]]

SUMMARY_AGE_S = 0.25
SILENT_S = 0.5
"""A shard that does not answer for this long is passed over. A placement takes a millisecond."""
_MAX_PLACED = 100_000  # requests whose shard is remembered, so that reports find it


class ShardedConductors:
    """The active conductors among `addresses`. It belongs to one event loop."""

    def __init__(self, channels: Channels, addresses: Sequence[str]) -> None:
        self._channels = channels
        self._addresses = tuple(addresses)
        self._shards: dict[str, Shard] = {}  # that answered the last query
        self._hot: HotPrefixes = {}
        self._queried_at = 0.0
        self._query: asyncio.Task[None] | None = None
        self._placed: OrderedDict[str, str] = OrderedDict()  # request id → address
        self._own: str | None = None  # where this instance is registered

    async def call(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Calls the shards that `request` concerns and returns one reply. Raises their error, or PeerLost if none
        answers."""
        match request:
            case conductor_pb2.PlaceRequest():
                return await self._place(method, request, timeout_s)
            case conductor_pb2.ReportRequest():
                return await self._report(method, request, timeout_s)
            case conductor_pb2.GetClusterRequest():
                return _merged_view(await self._call_all(method, request))
            case conductor_pb2.ExplainRequest():
                replies = await self._call_all(method, request)
                return next((reply for reply in replies if reply.found), replies[0])
        return await self._call_own(method, request, timeout_s)

    # Requests

    async def _place(
        self, method: Method, request: conductor_pb2.PlaceRequest, timeout_s: float
    ) -> conductor_pb2.PlaceReply:
        await self._refresh()
        key = routing_key(unpack_keys(request.block_keys), self._hot, request.request_id.encode())
        ends_at = time.monotonic() + timeout_s
        shards = in_order(key, self._shards.values())
        missing: MoonserveError = PeerLost(f"none of the conductors {', '.join(self._addresses)} answers")
        for number, shard in enumerate(shards):
            left_s = ends_at - time.monotonic()
            wait_s = left_s if number == len(shards) - 1 else min(left_s, SILENT_S)
            if left_s <= 0:
                break
            try:
                reply = await self._place_at(method, shard.address, request, wait_s)
            except PeerLost as error:
                log.info("conductor %s does not place a request: %s", shard.address, error)
                self._shards.pop(shard.address, None)  # until it answers a query
                missing = error
                continue
            if reply.failure.code != NoWorker.code:
                return reply
            missing = NoWorker(reply.failure.message)
        raise missing

    async def _place_at(
        self, method: Method, address: str, request: conductor_pb2.PlaceRequest, timeout_s: float
    ) -> conductor_pb2.PlaceReply:
        """Asks one shard, and the one that it names if that answers."""
        reply: conductor_pb2.PlaceReply = await self._call(method, address, request, timeout_s)
        if reply.WhichOneof("outcome") == "elsewhere":
            moved = conductor_pb2.PlaceRequest()
            moved.CopyFrom(request)
            moved.is_redirected = True
            try:
                address, reply = reply.elsewhere, await self._call(method, reply.elsewhere, moved, timeout_s)
            except PeerLost:
                reply = await self._call(method, address, moved, timeout_s)
        if reply.HasField("placement"):
            self._placed[request.request_id] = address
            if len(self._placed) > _MAX_PLACED:
                self._placed.popitem(last=False)
        return reply

    async def _report(
        self, method: Method, request: conductor_pb2.ReportRequest, timeout_s: float
    ) -> conductor_pb2.ReportReply:
        address = self._placed.get(request.request_id)
        if address is None:  # placed by another gateway or long ago: the load it adds expires
            return conductor_pb2.ReportReply()
        if request.phase != conductor_pb2.ReportRequest.PHASE_FIRST_TOKEN:
            del self._placed[request.request_id]
        reply: conductor_pb2.ReportReply = await self._call(method, address, request, timeout_s)
        return reply

    # Instances

    async def _call_own(self, method: Method, request: Any, timeout_s: float) -> Any:
        """Calls the shard of the instance that `request` names."""
        everyone = (Shard(address=address, weight=1.0) for address in self._addresses)
        candidates = [shard.address for shard in in_order(_group_of(request).encode(), everyone)]
        for address in candidates if self._own is None else (self._own,):
            try:
                reply = await self._call(method, address, request, min(timeout_s, 2 * SILENT_S))
            except PeerLost as error:
                self._own, lost = None, error
                continue
            self._own = address
            if isinstance(reply, conductor_pb2.HeartbeatReply) and reply.move_to:
                log.info("conductor %s sends this instance to %s", address, reply.move_to)
                self._own = reply.move_to
            return reply
        raise lost

    # All shards

    async def _refresh(self) -> None:
        """Starts a query if the summaries are old, and waits for it if there are none. Callers share one query."""
        if time.monotonic() - self._queried_at > SUMMARY_AGE_S and (self._query is None or self._query.done()):
            self._query = asyncio.create_task(self._query_all())
        if not self._shards and self._query is not None:
            await asyncio.shield(self._query)

    async def _query_all(self) -> None:
        summaries = await self._call_all(lambda stub: stub.Exchange, conductor_pb2.ShardSummary(), or_none=True)
        self._queried_at = time.monotonic()
        shards = [s for s in summaries if s.address in self._addresses]
        self._shards = {s.address: Shard.of_workers(s.address, s.num_prefills, s.num_decodes) for s in shards}
        self._hot = merged_hot(dict(zip(unpack_keys(s.hot_keys), s.branches, strict=True)) for s in shards)

    async def _call_all(self, method: Method, request: Any, or_none: bool = False) -> list[Any]:
        """Returns the replies of the shards that answer in time. Raises PeerLost if none does, unless `or_none`."""
        calls = (self._call(method, address, request, SILENT_S) for address in self._addresses)
        results = await asyncio.gather(*calls, return_exceptions=True)
        replies = [result for result in results if not isinstance(result, BaseException)]
        if not replies and not or_none:
            raise next(result for result in results if isinstance(result, BaseException))
        return replies

    async def _call(self, method: Method, address: str, request: Any, timeout_s: float) -> Any:
        stub: Stub = conductor_pb2_grpc.ConductorStub(self._channels.to(address))
        return await self._channels.call(method(stub), request, timeout_s=timeout_s)


def _group_of(request: Any) -> str:
    """Returns the name by which an instance is assigned: that of its home store, so that both have one shard."""
    if isinstance(request, conductor_pb2.RegisterRequest):
        return request.home_store or request.endpoint.instance_id
    instance_id: str = request.instance_id
    return instance_id


def _merged_view(views: Sequence[conductor_pb2.ClusterView]) -> conductor_pb2.ClusterView:
    """Returns one view of all instances; what workers share is taken from a shard that has workers."""
    merged = conductor_pb2.ClusterView()
    merged.CopyFrom(next((view for view in views if view.fingerprint), views[0]))
    del merged.instances[:]
    del merged.gateways[:]
    for view in views:
        merged.instances.extend(view.instances)
    merged.gateways.extend({gateway.instance_id: gateway for view in views for gateway in view.gateways}.values())
    merged.ready = any(view.ready for view in views)
    if lengths := [view.max_model_len for view in views if view.max_model_len]:
        merged.max_model_len = min(lengths)
    return merged
