"""A store node as its clients see it: how to call it, how to read its objects, and whether it currently answers.

Everything that belongs to one incarnation of the node is one `Attachment`: made on first use, replaced when the index
moves and dropped when the node is lost, so that state of a dead process never mixes with its successor's. A node that
did not answer is not used until a probe succeeds; no caller waits for it. Knows no keys and no values.
"""

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

from moonserve.kvstore.client.node_access.background import BackgroundLoop
from moonserve.kvstore.client.node_access.buffers import BufferSlots, RegisteredScratch
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.inline_client import PUT_BYTES, InlineClient, NotOffered
from moonserve.kvstore.client.node_access.inline_protocol import INLINE_METHOD
from moonserve.kvstore.client.node_access.lease_and_put import GIVE_BACK_TIMEOUT_S, Call, PutOptions, Steps
from moonserve.kvstore.client.node_access.mapped_and_remote import MappedObjects, RemoteObjects
from moonserve.kvstore.client.node_access.objects import ToPut
from moonserve.kvstore.index_layout import Entry, IndexMoved
from moonserve.kvstore.state.objects import PutOutcome
from moonserve.kvstore.wire import entries_from_wire
from moonserve.protocol.errors import DeadlineExceeded, Incompatible, InvalidRequest, MoonserveError, PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.request import NO_HINTS, Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.socket_client_sync import SyncChannel
from moonserve.protocol.rpc.wire import endpoint_from_wire
from moonserve.transfer import RemoteSegment, TransferEngine

log = logging.getLogger(__name__)

T = TypeVar("T")
Stub = kvstore_pb2_grpc.KvStoreStub
Describe = kvstore_pb2.StoreDescribeReply

PROBE_EVERY_S = 2.0
"""Seconds between two probes of a node that did not answer."""
_PROBE_S = 0.5
_CLOSE_S = 2.0
_ATTEMPTS = 3
"""Attempts per call to read an index that keeps moving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientResources:
    """Resources that all nodes of one client share."""

    engine: TransferEngine
    scratch: RegisteredScratch
    background: BackgroundLoop
    channels: Channels
    """Used in the background loop only."""
    maps: bool
    """True if the engine can map memory of this host."""
    offers_inline: bool
    """True if KV may use connections of its own, outside the engine: no TLS, rails or rdma are configured."""
    threads: concurrent.futures.ThreadPoolExecutor
    """Runs calls to several nodes concurrently."""

    @classmethod
    def over(
        cls, engine: TransferEngine, background: BackgroundLoop, channels: Channels, num_threads: int
    ) -> "ClientResources":
        options = engine.options
        others = channels.tls or "rdma" in options.transports or options.tls or options.rails
        return cls(
            engine=engine,
            scratch=RegisteredScratch(engine),
            background=background,
            channels=channels,
            maps="shm" in options.transports,
            offers_inline="tcp" in options.transports and not others,
            threads=concurrent.futures.ThreadPoolExecutor(num_threads, "kvstore client"),
        )

    def run_concurrently(self, calls: Sequence[Callable[[], T]]) -> list[T]:
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
            self.background.run(self.channels.close(), _CLOSE_S)
        self.background.close()
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
    inline: InlineClient | None
    """None if the node's memory is mapped."""
    mapped: MappedObjects | None = None
    remote: RemoteObjects | None = None


class StoreNode:
    """Thread-safe handle of one store node. `address` is its gRPC address."""

    def __init__(
        self, node_id: str, address: str, resources: ClientResources, *, capacity: float = 1.0, here: bool = False
    ) -> None:
        """`here`: the node runs on this host."""
        self.node_id = node_id
        self.address = address
        self.capacity = capacity
        """Bytes, if known. Only the ratio to the other nodes' capacities matters."""
        self.in_flight = 0
        """This client's calls and reads in flight. Replicas on nodes with fewer of them are preferred."""
        self.resting = False
        self._here = here and resources.maps
        self._resources = resources
        self._lock = threading.Lock()
        self._attaching = threading.Lock()
        """Held during calls to the node, so never taken together with `_lock`."""
        self._channels: set[SyncChannel | InlineClient] = set()
        self.attachment: Attachment | None = None
        """Current attachment, or None if the node is not attached."""
        self._forgotten = False

    @property
    def is_mapped(self) -> bool:
        """True if the node's memory is mapped; before the first attachment, True if mapping is worth trying."""
        attached = self.attachment
        return self._here if attached is None else attached.mapped is not None

    @property
    def near(self) -> MappedObjects | None:
        """Mapped memory of the node, or None if it is not mapped yet."""
        attached = self.attachment
        return None if attached is None else attached.mapped

    def attached(self, deadline: Deadline) -> Attachment:
        """Returns the attachment, made if needed. Raises PeerLost, DeadlineExceeded, Unauthenticated, Incompatible."""
        return self.attachment or self._changed(None, self._attach, deadline)

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
                return cast("T", done.value)
            if isinstance(step, Call):
                answer = self.call(*step, deadline)
            else:
                self._resources.engine.run([step], deadline_s=deadline.left_s())
                answer = None

    def put_inline(
        self, objects: Sequence[ToPut], slots: BufferSlots, terms: PutOptions, deadline: Deadline
    ) -> list[PutOutcome]:
        """Stores objects in one round trip; all are LATER if node, size or hints do not allow it. Raises as `call`."""
        later = [PutOutcome.LATER] * len(objects)

        def put(way: Attachment) -> list[PutOutcome]:
            if way.inline is None or slots.nbytes > PUT_BYTES or terms.hints != NO_HINTS:  # there is no field for hints
                return later
            try:
                return way.inline.put(objects, slots, terms, deadline)
            except NotOffered:
                return later

        return self.with_current_index(put, deadline)

    def with_current_index(self, work: Callable[[Attachment], T], deadline: Deadline) -> T:
        """Returns the result of `work`, repeated with a newer index if its index has moved. Raises as `attached`."""
        for _ in range(_ATTEMPTS):
            attached = self.attached(deadline)
            self._load(1)
            try:
                return work(attached)
            except IndexMoved:
                self._changed(attached, partial(self._attach_again, attached), deadline)
            finally:
                self._load(-1)
        raise self._lost_error("its index moves all the time")

    def mark_lost(self, error: MoonserveError) -> None:
        """Marks the node as not answering. It is detached and probed in the background until it answers."""
        with self._lock:
            if self.resting or self._forgotten:
                return
            self.resting = True
        self._detach()
        log.warning("store node %s does not answer: %s", self.node_id, error)
        self._resources.background.start(self._revive())

    def detach_for_good(self) -> None:
        """Detaches the node for good: it left, another incarnation replaced it, or the client closes."""
        with self._lock:
            self._forgotten = True
        self._detach()

    async def call_in_background(self, method: Callable[[Any], Any], request: Any, timeout_s: float) -> Any:
        """Calls the node from the background loop. Attaches nothing: raises PeerLost if the node is not attached."""
        attached = self.attachment
        if attached is None:
            raise self._lost_error("is not attached")
        stub = self._async_stub(attached.lean_address)
        return await self._resources.channels.call(method(stub), request, timeout_s=timeout_s)

    async def give_back(self, call: Call) -> None:
        """Gives a right back from the background loop. If that fails, the right expires at the node."""
        with contextlib.suppress(MoonserveError):
            await self.call_in_background(*call, GIVE_BACK_TIMEOUT_S)

    def _load(self, change: int) -> None:
        with self._lock:
            self.in_flight += change

    def _async_stub(self, address: str) -> Any:
        return kvstore_pb2_grpc.KvStoreStub(self._resources.channels.to(address))

    async def _describe(self, timeout_s: float) -> Describe:
        channels = self._resources.channels
        stub = self._async_stub(self.address)
        request = kvstore_pb2.StoreDescribeRequest()
        reply: Describe = await channels.call(stub.Describe, request, timeout_s=timeout_s)
        return reply

    def _attach(self, deadline: Deadline) -> Attachment:
        left_s = deadline.left_s()
        described = self._resources.background.run(self._describe(left_s), left_s)
        endpoint = replace(endpoint_from_wire(described.endpoint), rpc_address=self.address)
        here = endpoint.host == host_identity()
        lean_address = described.lean_unix_address if here else described.lean_address
        channel = SyncChannel(lean_address, self._resources.channels.cluster_token, self._resources.channels.tls)
        return self._open(
            Attachment(
                endpoint=endpoint,
                lean_address=lean_address,
                stub=Stub(cast(grpc.Channel, channel)),  # SyncChannel implements what stubs use
                channel=channel,
                data=RemoteSegment(endpoint.transfer_address, described.segment_id),
                inline=self._inline_client(described.lean_address),
            ),
            described.index_segment_id,
            deadline,
        )

    def _open(self, attachment: Attachment, index_id: int, deadline: Deadline) -> Attachment:
        """Adds the readers of the index: mapped if possible, otherwise remote."""
        resources, address = self._resources, attachment.endpoint.transfer_address
        segments = resources.engine.open(address, deadline_s=deadline.left_s())
        sizes = {each.segment_id: each.info.nbytes for each in segments if each.info is not None}
        index = RemoteSegment(address, index_id)
        data = attachment.data
        if index_id not in sizes or data.segment_id not in sizes:
            raise IndexMoved
        try:
            near = MappedObjects(
                resources.engine.map(index, 0, sizes[index_id], deadline_s=deadline.left_s()),
                resources.engine.map(data, 0, sizes[data.segment_id], deadline_s=deadline.left_s()),
            )
        except (InvalidRequest, Incompatible):  # not mappable or not readable from this process
            find = partial(_find, attachment.stub)
            far = RemoteObjects(resources.engine, find, data, attachment.inline)
            return replace(attachment, mapped=None, remote=far)
        return replace(attachment, mapped=near, remote=None, inline=None)

    def _inline_client(self, lean_address: str) -> InlineClient | None:
        """Returns an inline client, over TCP even on one host: memory that is not mapped is not read another way."""
        if not self._resources.offers_inline:
            return None
        channel = SyncChannel(lean_address, self._resources.channels.cluster_token, self._resources.channels.tls)
        return InlineClient(lambda left_s: channel.take_over(INLINE_METHOD, timeout_s=left_s))

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
            if self.attachment is not None and self.attachment is not seen:
                return self.attachment
            if self.resting or self._forgotten:
                raise self._lost_error("rests, since it did not answer")
            attached = self._settled(attach, deadline)
            with self._lock:
                self._channels.add(attached.channel)
                if attached.inline is not None:
                    self._channels.add(attached.inline)
                self.attachment = attached
            return attached
        finally:
            self._attaching.release()

    def _settled(self, attach: Callable[[Deadline], Attachment], deadline: Deadline) -> Attachment:
        """Returns the result of `attach`, repeated if the index moves between its description and its first use."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(IndexMoved):
                return attach(deadline)
        raise self._lost_error("its index moves all the time")

    def _detach(self) -> None:
        """Drops the attachment and its connections. Mapped memory stays mapped for readers that still use it."""
        with self._lock:
            attached, self.attachment = self.attachment, None
            channels = list(self._channels)
        # Close the channels of earlier attachments again: a call in flight may have left its connection open.
        for channel in channels:
            channel.close()
        if attached is not None:
            self._resources.engine.forget(attached.endpoint.transfer_address)
            with contextlib.suppress(PeerLost):  # the client is closed
                self._resources.background.start(self._resources.channels.forget(attached.lean_address))

    async def _revive(self) -> None:
        """Probes the node periodically until it answers, then marks it as usable again."""
        while not self._forgotten:
            await asyncio.sleep(PROBE_EVERY_S)
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
