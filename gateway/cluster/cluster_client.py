"""The gateway's client of the cluster: its view of the instances, and calls and streams to them.

Polls the conductor for the view once per second, more often while requests cannot be placed or a worker is late. Keeps
one Events stream per worker, opened when the view or a placement first names it and reopened when it breaks. The
listener is notified at once of every break and of silence: requests in flight on a broken stream are lost, whether or
not the worker lives. This module does not know the life of single requests, or HTTP.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from moonserve.gateway.cluster.avoided_instances import Incarnation
from moonserve.gateway.cluster.failure_detection import (
    STREAM_SILENT_AFTER_S,
    FailureDetector,
    LifeSign,
    WorkerStream,
    is_late,
)
from moonserve.protocol.errors import IntegrityError, MoonserveError, NoWorker, Overloaded, PeerLost
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.pb import conductor_pb2, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.event_loop import LoggedTasks
from moonserve.protocol.request import Endpoint, GatewayId, Placement, RequestId, Role
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import endpoint_from_wire, failure_from_wire, from_message, role_from_wire

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
# Used while no request can be placed, so that the first request does not meet an old view.
_UNREADY_POLL_INTERVAL_S = 0.1
# Longest wait for one answer. It ends no request: a placement is requested again until the request's patience or
# deadline ends (`RequestState`), and a submission goes to another worker, since a worker silent for that long counts as
# lost (`gateway.cluster.failure_detection`).
_CALL_TIMEOUT_S = 5.0
_LATE_POLL_INTERVAL_S = 0.25  # while a worker's heartbeat is late
# A view older than this says nothing about which instances are alive.
_VIEW_LIFETIME_S = 5.0
# A stopped worker must not continue a cancelled request: it is notified if it wakes up within this time.
_CANCEL_WITHIN_S = 60.0
_CANCEL_AGAIN_S = 1.0

_WORKER_ROLES = (Role.PREFILL, Role.DECODE)


class ClusterClient:
    """Client of the conductor and of all workers. Used in one event loop."""

    def __init__(
        self,
        channels: Channels,
        conductor_addresses: str,
        gateway_id: GatewayId,
        *,
        on_batch: Callable[[str, worker_pb2.EventBatch], Awaitable[None]],
        on_lost: Callable[[str, MoonserveError], None],
        on_view: Callable[[conductor_pb2.ClusterView], None],
        describe_self: Callable[[], conductor_pb2.GatewayView],
    ) -> None:
        """`describe_self`: returns what is reported about this gateway with each poll."""
        self._channels = channels
        self._conductors = ConductorClient(channels, conductor_addresses)
        self._gateway_id = gateway_id
        self._on_batch = on_batch
        self._on_lost = on_lost
        self._on_view = on_view
        self._describe_self = describe_self
        self._view: conductor_pb2.ClusterView | None = None
        self._model_info: conductor_pb2.ClusterView | None = None  # the last view that had workers
        self._viewed_at = 0.0
        self._ready_at = -math.inf  # time of the last view in which a request could be placed
        self._streams: dict[str, WorkerStream] = {}
        self._failure_detector = FailureDetector()
        self._silent: set[str] = set()  # workers reported as silent
        self._is_late = False  # True if any worker is late
        self._tasks = LoggedTasks()

    @property
    def view(self) -> conductor_pb2.ClusterView | None:
        """The last view, or None if it is too old."""
        age_s = asyncio.get_running_loop().time() - self._viewed_at
        return self._view if age_s < _VIEW_LIFETIME_S else None

    @property
    def is_ready(self) -> bool:
        """True if a request could be placed."""
        return self.view is not None and self.view.ready

    def was_ready_within(self, seconds: float) -> bool:
        """Returns True if a request could have been placed within the last `seconds`."""
        return asyncio.get_running_loop().time() - self._ready_at < seconds

    def model_info(self) -> conductor_pb2.ClusterView:
        """Returns what workers report about their model: fingerprint, layout, `max_model_len`. Raises NoWorker if none
        has yet. Unlike liveness, facts do not age: while no conductor leads, or a restarted one knows no workers yet,
        requests are accepted and wait."""
        if self._model_info is None:
            raise NoWorker("no worker has joined the cluster yet")
        return self._model_info

    async def run(self) -> None:
        """Keeps the view fresh until cancelled."""
        while True:
            await self.refresh()
            for stream in self._streams.values():
                stream.check_silence(asyncio.get_running_loop().time())
            await asyncio.sleep(self._poll_delay_s())

    def _poll_delay_s(self) -> float:
        if not self.is_ready:
            return _UNREADY_POLL_INTERVAL_S
        return _LATE_POLL_INTERVAL_S if self._is_late else POLL_INTERVAL_S

    async def wait_ready(self, timeout_s: float) -> None:
        """Waits until a request could be placed, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_ready:
                    await self.refresh()
                    await asyncio.sleep(_UNREADY_POLL_INTERVAL_S)

    async def refresh(self) -> None:
        """Polls the conductor once. After a failure the old view stays and ages."""
        try:
            view = await self._conductors.call(
                lambda conductor: conductor.GetCluster,
                conductor_pb2.GetClusterRequest(gateway=self._describe_self()),
                timeout_s=_CALL_TIMEOUT_S,
            )
        except MoonserveError as error:
            log.debug("no view of the cluster: %s", error)
            return
        self._view, self._viewed_at = view, asyncio.get_running_loop().time()
        if view.fingerprint:
            self._model_info = view
        if view.ready:
            self._ready_at = self._viewed_at
        self._on_view(view)
        await self._follow(view)
        self._detect_silence(view)

    async def place(self, request: conductor_pb2.PlaceRequest, timeout_s: float) -> Placement:
        """Requests a placement. Raises Overloaded, NoWorker or PeerLost, among others."""
        reply = await self._conductors.call(
            lambda conductor: conductor.Place, request, timeout_s=min(timeout_s, _CALL_TIMEOUT_S)
        )
        match reply.WhichOneof("outcome"):
            case "placement":
                return from_message(Placement, reply.placement)
            case "overloaded":
                message = reply.overloaded
                raise Overloaded(
                    message.reason or "no instance can meet the latency targets now",
                    retry_after_s=message.retry_after_s,
                    predicted_ttft_s=message.predicted_ttft_s,
                    predicted_tbt_s=message.predicted_tbt_s,
                )
            case _:
                raise failure_from_wire(reply.failure)

    async def submit(self, endpoint: Endpoint, request: worker_pb2.SubmitRequest) -> None:
        """Submits a request to a prefill worker."""
        await self._channels.call(
            self._worker(endpoint.rpc_address).Submit,
            request,
            timeout_s=min(request.timeout_s, _CALL_TIMEOUT_S),
        )

    async def cancel(self, endpoint: Endpoint, request_id: RequestId) -> None:
        """Cancels a request at a worker. Best effort: an unreachable worker gives up without the gateway's stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_WITHIN_S):
                while not await self._try_cancel(endpoint, request_id):  # noqa: ASYNC110 - it is elsewhere
                    await asyncio.sleep(_CANCEL_AGAIN_S)

    async def _try_cancel(self, endpoint: Endpoint, request_id: RequestId) -> bool:
        """Returns True if no further cancel is needed: only a silent worker may still receive one."""
        try:
            await self._channels.call(
                self._worker(endpoint.rpc_address).Cancel,
                worker_pb2.CancelRequest(request_id=request_id),
                timeout_s=_CALL_TIMEOUT_S,
            )
        except MoonserveError:
            known = self._streams.get(endpoint.instance_id)
            is_same = known is not None and known.endpoint.epoch == endpoint.epoch
            return not (is_same and endpoint.instance_id in self._silent)
        return True

    async def report(self, request: conductor_pb2.ReportRequest) -> None:
        """Reports an outcome to the conductor. Best effort: the conductor lets predicted load expire."""
        with contextlib.suppress(MoonserveError):
            await self._conductors.call(lambda c: c.Report, request, timeout_s=_CALL_TIMEOUT_S)

    async def explain(self, request_id: str) -> conductor_pb2.ExplainReply:
        """Returns the conductor's explanation of a request's placement."""
        return await self._conductors.call(
            lambda conductor: conductor.Explain,
            conductor_pb2.ExplainRequest(request_id=request_id),
            timeout_s=_CALL_TIMEOUT_S,
        )

    async def steps(self, instance_id: str) -> worker_pb2.StepLog | None:
        """Returns the latest steps of a worker, or None if there is no such worker."""
        known = self._streams.get(instance_id)
        if known is None:
            return None
        worker, request = self._worker(known.endpoint.rpc_address), worker_pb2.GetStepsRequest()
        log: worker_pb2.StepLog = await self._channels.call(worker.GetSteps, request, timeout_s=_CALL_TIMEOUT_S)
        return log

    def instances_to_avoid(self, incarnations: Iterable[Incarnation]) -> set[str]:
        """Returns instances to exclude: `incarnations` without a known successor, and silent instances."""
        return self._silent | {
            instance_id
            for instance_id, epoch in incarnations
            if (stream := self._streams.get(instance_id)) is None or stream.endpoint.epoch <= epoch
        }

    def follow_events(self, endpoint: Endpoint) -> bool:
        """Ensures that the worker's events are received. Returns False if it has a successor: its events are void."""
        known = self._streams.get(endpoint.instance_id)
        if known is not None and known.endpoint.epoch >= endpoint.epoch:
            return known.endpoint.epoch == endpoint.epoch
        stream = self._streams[endpoint.instance_id] = WorkerStream(endpoint=endpoint)
        if known is not None:
            self._replace(known, endpoint)
        stream.task = self._tasks.start(self._listen(stream), name=f"events {endpoint.instance_id}")
        return True

    async def wait_for_streams(self, endpoints: Iterable[Endpoint]) -> None:
        """Waits until broken streams from `endpoints` are open again or cannot be opened. A request that begins before
        that would be lost with the missed events, though it missed none."""
        for endpoint in endpoints:
            stream = self._streams.get(endpoint.instance_id)
            if stream is not None and stream.is_broken:
                await stream.wait_until_settled()

    def open_since(self) -> dict[Incarnation, float]:
        """Returns when the open streams were opened."""
        return {
            (stream.endpoint.instance_id, stream.endpoint.epoch): stream.opened_at
            for stream in self._streams.values()
            if stream.is_open
        }

    async def close(self) -> None:
        await self._tasks.cancel()

    def _replace(self, old: WorkerStream, new: Endpoint) -> None:
        """Fails requests that wait for an incarnation that has a successor."""
        instance_id = new.instance_id
        self._report_lost(instance_id, f"epoch {old.endpoint.epoch} was replaced by epoch {new.epoch}")
        self._tasks.start(self._retire(old), name=f"retire {instance_id}")

    async def _retire(self, old: WorkerStream) -> None:
        if old.task is not None:
            old.task.cancel()
            await asyncio.wait([old.task])
            old.on_end()
        await self._close_channel(old.endpoint.rpc_address)

    async def _close_channel(self, address: str) -> None:
        """Closes the channel to a worker that is gone, unless another one has its address."""
        if all(stream.endpoint.rpc_address != address for stream in self._streams.values()):
            await self._channels.forget(address)

    def _worker(self, rpc_address: str) -> Any:
        return worker_pb2_grpc.WorkerStub(self._channels.to(rpc_address))

    async def _follow(self, view: conductor_pb2.ClusterView) -> None:
        present: dict[str, Endpoint] = {}
        for instance in view.instances:
            if role_from_wire(instance.role) in _WORKER_ROLES:
                endpoint = endpoint_from_wire(instance.endpoint)
                present[endpoint.instance_id] = endpoint
                self.follow_events(endpoint)
        for instance_id in self._streams.keys() - present.keys():
            await self._drop_broken(instance_id)

    def _detect_silence(self, view: conductor_pb2.ClusterView) -> None:
        signs = [self._sign(i) for i in view.instances if role_from_wire(i.role) in _WORKER_ROLES]
        self._is_late = is_late(signs)
        now_silent = self._failure_detector.find_silent(signs, self._viewed_at)
        for instance_id in now_silent - self._silent:
            log.warning("%s sends no heartbeats", instance_id)
            self._report_lost(instance_id, "sends no heartbeats")
        self._silent = now_silent

    def _sign(self, instance: conductor_pb2.InstanceView) -> LifeSign:
        stream = self._streams[instance.endpoint.instance_id]
        return LifeSign(
            instance_id=instance.endpoint.instance_id,
            role=role_from_wire(instance.role),
            draining=instance.draining,
            last_heard_s=instance.last_heard_s,
            last_message_s=asyncio.get_running_loop().time() - stream.last_message_at,
        )

    async def _drop_broken(self, instance_id: str) -> None:
        """Forgets a worker that is neither in the view nor connected.

        Requests that began after its stream broke fail: they would wait forever.
        """
        stream = self._streams[instance_id]
        if stream.is_open or stream.task is None:
            return
        del self._streams[instance_id]
        stream.task.cancel()
        self._report_lost(instance_id, "left the cluster")
        await self._close_channel(stream.endpoint.rpc_address)

    async def _listen(self, stream: WorkerStream) -> None:
        """Opens the stream repeatedly until cancelled."""
        instance_id = stream.endpoint.instance_id
        while True:
            reason = await self._listen_once(stream)
            stream.on_end()
            if self._streams.get(instance_id) is stream:
                self._report_lost(instance_id, reason)
            await stream.wait_before_reopening()

    async def _listen_once(self, stream: WorkerStream) -> str:
        """Delivers the stream's batches; returns the reason why it ended."""
        endpoint = stream.endpoint
        worker = self._worker(endpoint.rpc_address)
        try:
            # The first reply names the worker's lean address, which the stream then uses.
            await self._channels.call(worker.GetStatus, worker_pb2.GetStatusRequest(), timeout_s=_CALL_TIMEOUT_S)
            request = worker_pb2.EventsRequest(gateway_id=self._gateway_id)
            async with asyncio.timeout(None) as stream.read_timeout:
                async for batch in self._channels.stream(worker.Events, request):
                    stream.on_message(asyncio.get_running_loop().time())
                    if batch.HasField("standing"):
                        self._on_standing(stream, batch.standing)
                    else:
                        stream.on_batch()
                        await self._on_batch(endpoint.instance_id, batch)
        except MoonserveError as error:
            return f"broke its stream: {error.message}"
        except TimeoutError:
            return f"sent nothing for {STREAM_SILENT_AFTER_S:.0f} s"
        except Exception:  # a bug here; a listener that ended would leave all later requests waiting
            log.exception("cannot process events of %s", endpoint.instance_id)
            return "sent events that this gateway cannot process"
        return "ended its stream"

    def _on_standing(self, stream: WorkerStream, standing: worker_pb2.Standing) -> None:
        """Fails requests that wait for events that were missed."""
        instance_id = stream.endpoint.instance_id
        if not stream.on_standing(standing) and self._streams.get(instance_id) is stream:
            # The worker is alive: this is not a loss of the peer.
            self._report_lost(instance_id, "has sent events that this gateway missed", IntegrityError)

    def _report_lost(self, instance_id: str, reason: str, kind: type[MoonserveError] = PeerLost) -> None:
        self._on_lost(instance_id, kind(f"{instance_id} {reason}", instance_id=instance_id))
