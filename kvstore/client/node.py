"""A store node as its clients see it: how to call it, how to read its objects, and whether it currently answers.

Everything that belongs to one incarnation of the node is one `Attachment`: made on first use, replaced when the index
moves and dropped when the node is lost, so that state of a dead process never mixes with its successor's. A node that
did not answer is not used until a probe succeeds; no caller waits for it. Knows no keys and no values.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import grpc

from kvstore.client.backstage import Backstage
from kvstore.client.deadline import Deadline
from kvstore.client.express import PUT_BYTES, Express, NotOffered
from kvstore.client.far import Far
from kvstore.client.near import Near
from kvstore.client.objects import ToPut
from kvstore.client.rights import UNDO_TIMEOUT_S, Call, Steps, Terms
from kvstore.client.scratch import Scratch
from kvstore.client.spots import Spots
from kvstore.express.frames import METHOD
from kvstore.native.base import Entry
from kvstore.native.layout import Retired
from kvstore.promises import Outcome
from kvstore.wire import entries_from_wire
from protocol.errors import (
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    MoonserveError,
    PeerLost,
)
from protocol.keys import BlockKey
from protocol.lean.sync_channel import SyncChannel
from protocol.machine import host_identity
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from protocol.request import Endpoint
from protocol.rpc import Channels
from protocol.wire import endpoint_from_wire
from transfer import RemoteSegment, TransferEngine

log = logging.getLogger(__name__)

T = TypeVar("T")
Stub = kvstore_pb2_grpc.KvStoreStub
Describe = kvstore_pb2.StoreDescribeReply

REST_S = 2.0
"""Seconds between two probes of a node that did not answer."""
_PROBE_S = 0.5
_CLOSE_S = 2.0
_ATTEMPTS = 3
"""Attempts per call to read an index that keeps moving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Resources that all nodes of one client share."""

    engine: TransferEngine
    scratch: Scratch
    backstage: Backstage
    channels: Channels
    """Used in the backstage loop only."""
    maps: bool
    """True if the engine can map memory of this host."""
    express: bool
    """True if KV may use connections of its own, outside the engine: no TLS, rails or rdma are configured."""
    threads: concurrent.futures.ThreadPoolExecutor
    """Runs calls to several nodes concurrently."""

    @classmethod
    def over(cls, engine: TransferEngine, backstage: Backstage, channels: Channels, num_threads: int) -> Means:
        options = engine.options
        others = channels.tls or "rdma" in options.transports or options.tls or options.rails
        return cls(
            engine=engine,
            scratch=Scratch(engine),
            backstage=backstage,
            channels=channels,
            maps="shm" in options.transports,
            express="tcp" in options.transports and not others,
            threads=concurrent.futures.ThreadPoolExecutor(num_threads, "kvstore client"),
        )

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Runs the calls concurrently, the first in this thread, and returns their results in order.

        When it returns or raises, no call is running. Raises the error of the first call that failed.
        """
        others = [self.threads.submit(call) for call in calls[1:]]
        try:
            first = [call() for call in calls[:1]]
        finally:
            concurrent.futures.wait(others)
        return [*first, *(other.result() for other in others)]

    def close(self) -> None:
        """Closes all shared resources; no call may be in flight. Idempotent."""
        self.threads.shutdown()
        with contextlib.suppress(PeerLost, DeadlineExceeded):  # already closed
            self.backstage.ask(self.channels.close(), _CLOSE_S)
        self.backstage.close()
        self.scratch.close()
        self.engine.close()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Attachment:
    """Connection to one incarnation of a node and to one version of its index."""

    endpoint: Endpoint
    lean_address: str
    stub: Stub
    channel: SyncChannel
    data: RemoteSegment
    near: Near | None
    far: Far | None
    express: Express | None
    """None if the node's memory is mapped."""


class StoreNode:
    """Thread-safe handle of one store node. `address` is its gRPC address."""

    def __init__(self, node_id: str, address: str, means: Means, *, capacity: float = 1.0, here: bool = False) -> None:
        """`here`: the node runs on this host."""
        self.node_id = node_id
        self.address = address
        self.capacity = capacity
        """Bytes, if known. Only the ratio to the other nodes' capacities matters."""
        self.in_flight = 0
        """This client's calls and reads in flight. Replicas on nodes with fewer of them are preferred."""
        self.resting = False
        self._here = here and means.maps
        self._means = means
        self._lock = threading.Lock()
        self._attaching = threading.Lock()
        """Held during calls to the node, so never taken together with `_lock`."""
        self._channels: set[SyncChannel | Express] = set()
        self._attached: Attachment | None = None
        self._forgotten = False

    @property
    def is_near(self) -> bool:
        """True if the node's memory is mapped; before the first attachment, True if mapping is worth trying."""
        attached = self._attached
        return self._here if attached is None else attached.near is not None

    @property
    def near(self) -> Near | None:
        """Mapped memory of the node, or None if it is not mapped yet."""
        attached = self._attached
        return None if attached is None else attached.near

    @property
    def attachment(self) -> Attachment | None:
        """Current attachment, or None if the node is not attached."""
        return self._attached

    def attached(self, deadline: Deadline) -> Attachment:
        """Returns the attachment, made if needed. Raises PeerLost, DeadlineExceeded, Unauthenticated, Incompatible."""
        return self._attached or self._changed(None, self._attach, deadline)

    def call(self, method: Callable[[Stub], Callable[..., T]], request: Any, deadline: Deadline) -> T:
        """Calls the node in the caller's thread. Raises the node's own error, PeerLost, DeadlineExceeded."""
        attached = self.attached(deadline)
        self._load(1)
        try:
            return method(attached.stub)(request, timeout=deadline.call_s())
        finally:
            self._load(-1)

    def run(self, steps: Steps[T], deadline: Deadline) -> T:
        """Runs the steps in the caller's thread and returns their result. Raises as `call` and as transfers do."""
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Call):
                answer = self.call(*step, deadline)
            else:
                self._means.engine.run([step], deadline_s=deadline.left_s())
                answer = None

    def put_at_once(self, objects: Sequence[ToPut], spots: Spots, terms: Terms, deadline: Deadline) -> list[Outcome]:
        """Stores objects in one round trip; all are LATER if node or size do not allow it. Raises as `call`."""
        later = [Outcome.LATER] * len(objects)

        def put(way: Attachment) -> list[Outcome]:
            if way.express is None or spots.nbytes > PUT_BYTES:
                return later
            try:
                return way.express.put(objects, spots, terms, deadline)
            except NotOffered:
                return later

        return self.reading(put, deadline)

    def reading(self, work: Callable[[Attachment], T], deadline: Deadline) -> T:
        """Returns the result of `work`, repeated with a newer index if its index has moved. Raises as `attached`."""
        for _ in range(_ATTEMPTS):
            attached = self.attached(deadline)
            self._load(1)
            try:
                return work(attached)
            except Retired:
                self._changed(attached, partial(self._attach_again, attached), deadline)
            finally:
                self._load(-1)
        raise self._lost_error("its index moves all the time")

    def lost(self, error: MoonserveError) -> None:
        """Marks the node as not answering. It is detached and probed in the background until it answers."""
        with self._lock:
            if self.resting or self._forgotten:
                return
            self.resting = True
        self._detach()
        log.warning("store node %s does not answer: %s", self.node_id, error)
        self._means.backstage.begin(self._revive())

    def forget(self) -> None:
        """Detaches the node for good: it left, another incarnation replaced it, or the client closes."""
        with self._lock:
            self._forgotten = True
        self._detach()

    async def ask(self, method: Callable[[Any], Any], request: Any, timeout_s: float) -> Any:
        """Calls the node from the backstage loop. Attaches nothing: raises PeerLost if the node is not attached."""
        attached = self._attached
        if attached is None:
            raise self._lost_error("is not attached")
        stub = self._async_stub(attached.lean_address)
        return await self._means.channels.call(method(stub), request, timeout_s=timeout_s)

    async def undo(self, call: Call) -> None:
        """Gives a right back from the backstage loop. If that fails, the right expires at the node."""
        with contextlib.suppress(MoonserveError):
            await self.ask(*call, UNDO_TIMEOUT_S)

    def _load(self, change: int) -> None:
        with self._lock:
            self.in_flight += change

    def _async_stub(self, address: str) -> Any:
        return kvstore_pb2_grpc.KvStoreStub(self._means.channels.to(address))

    async def _describe(self, timeout_s: float) -> Describe:
        channels = self._means.channels
        stub = self._async_stub(self.address)
        request = kvstore_pb2.StoreDescribeRequest()
        reply: Describe = await channels.call(stub.Describe, request, timeout_s=timeout_s)
        return reply

    def _attach(self, deadline: Deadline) -> Attachment:
        left_s = deadline.left_s()
        described = self._means.backstage.ask(self._describe(left_s), left_s)
        endpoint = replace(endpoint_from_wire(described.endpoint), rpc_address=self.address)
        here = endpoint.host == host_identity()
        lean_address = described.lean_unix_address if here else described.lean_address
        channel = SyncChannel(lean_address, self._means.channels.cluster_token, self._means.channels.tls)
        return self._open(
            Attachment(
                endpoint=endpoint,
                lean_address=lean_address,
                stub=Stub(cast(grpc.Channel, channel)),  # SyncChannel implements what stubs use
                channel=channel,
                data=RemoteSegment(endpoint.transfer_address, described.segment_id),
                near=None,
                far=None,
                express=self._express(described.lean_address),
            ),
            described.index_segment_id,
            deadline,
        )

    def _open(self, attachment: Attachment, index_id: int, deadline: Deadline) -> Attachment:
        """Adds the readers of the index: mapped if possible, otherwise remote."""
        means, address = self._means, attachment.endpoint.transfer_address
        segments = means.engine.open(address, deadline_s=deadline.left_s())
        sizes = {each.segment_id: each.info.nbytes for each in segments if each.info is not None}
        index = RemoteSegment(address, index_id)
        data = attachment.data
        if index_id not in sizes or data.segment_id not in sizes:
            raise Retired
        try:
            near = Near(
                means.engine.map(index, 0, sizes[index_id], deadline_s=deadline.left_s()),
                means.engine.map(data, 0, sizes[data.segment_id], deadline_s=deadline.left_s()),
            )
        except (InvalidRequest, Incompatible):  # not mappable or not readable from this process
            find = partial(_find, attachment.stub)
            far = Far(means.engine, find, data, attachment.express)
            return replace(attachment, near=None, far=far)
        return replace(attachment, near=near, far=None, express=None)

    def _express(self, lean_address: str) -> Express | None:
        """Returns an express client, over TCP even on one host: memory that is not mapped is not read another way."""
        if not self._means.express:
            return None
        channel = SyncChannel(lean_address, self._means.channels.cluster_token, self._means.channels.tls)
        return Express(lambda left_s: channel.hand_over(METHOD, timeout_s=left_s))

    def _attach_again(self, seen: Attachment, deadline: Deadline) -> Attachment:
        """Attaches to the index that is in use now."""
        request = kvstore_pb2.StoreDescribeRequest()
        described: Describe = seen.stub.Describe(request, timeout=deadline.left_s())
        return self._open(seen, described.index_segment_id, deadline)

    def _changed(
        self,
        seen: Attachment | None,
        attach: Callable[[Deadline], Attachment],
        deadline: Deadline,
    ) -> Attachment:
        """Returns the result of `attach`, or the attachment that another thread has made instead of `seen`."""
        if not self._attaching.acquire(timeout=deadline.left_s()):
            raise DeadlineExceeded(f"store node {self.node_id} could not be reached in time")
        try:
            if self._attached is not None and self._attached is not seen:
                return self._attached
            if self.resting or self._forgotten:
                raise self._lost_error("rests, since it did not answer")
            attached = self._settled(attach, deadline)
            with self._lock:
                self._channels.add(attached.channel)
                if attached.express is not None:
                    self._channels.add(attached.express)
                self._attached = attached
            return attached
        finally:
            self._attaching.release()

    def _settled(self, attach: Callable[[Deadline], Attachment], deadline: Deadline) -> Attachment:
        """Returns the result of `attach`, repeated if the index moves between its description and its first use."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Retired):
                return attach(deadline)
        raise self._lost_error("its index moves all the time")

    def _detach(self) -> None:
        """Drops the attachment and its connections. Mapped memory stays mapped for readers that still use it."""
        with self._lock:
            attached, self._attached = self._attached, None
            channels = list(self._channels)
        # Close the channels of earlier attachments again: a call in flight may have left its connection open.
        for channel in channels:
            channel.close()
        if attached is not None:
            self._means.engine.forget(attached.endpoint.transfer_address)
            with contextlib.suppress(PeerLost):  # the client is closed
                self._means.backstage.begin(self._means.channels.forget(attached.lean_address))

    async def _revive(self) -> None:
        """Probes the node periodically until it answers, then marks it as usable again."""
        while not self._forgotten:
            await asyncio.sleep(REST_S)
            try:
                await self._describe(_PROBE_S)
            except MoonserveError:
                continue
            self.resting = False
            log.info("store node %s answers again", self.node_id)
            return

    def _lost_error(self, why: str) -> PeerLost:
        return PeerLost(f"store node {self.node_id} {why}", peer=self.node_id)


def _find(stub: Stub, keys: Sequence[BlockKey], deadline: Deadline) -> Sequence[Entry | None]:
    request = kvstore_pb2.StoreFindRequest(keys=keys)
    return entries_from_wire(stub.Find(request, timeout=deadline.call_s()))
