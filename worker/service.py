"""The shell around a worker's pure state, and its gRPC service: passes events in, performs actions, reports outcomes.

Events are handled one after the other in the event loop's thread. Any action that takes time is an operation
(`worker.operations`) whose outcome is a new event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc.aio

from engine.block_pool import BlockPool
from protocol.errors import Cancelled, InvalidRequest
from protocol.ids import GatewayId, RequestId
from protocol.keys import BlockKey
from protocol.logs import of
from protocol.pb import conductor_pb2, worker_pb2, worker_pb2_grpc
from protocol.request import Endpoint
from protocol.streams import GatewayStreams
from protocol.timer import Timer
from protocol.tracing import Tracer
from worker.events import Action, Event, Fail, GatewayLost, RequestCancelled, StoreFound, Tick
from worker.operations import Operation, Operations

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerState(Protocol):
    """Common interface of `PrefillState` and `DecodeState`, used by the shell."""

    @property
    def pool(self) -> BlockPool: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def wake_at(self) -> float | None: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_held_blocks(self) -> int: ...

    def handle(self, event: Any, now: float, /) -> Sequence[Action]: ...
    def evicted(self, key: BlockKey, /) -> None: ...
    def counted(self) -> dict[str, int]: ...


class WorkerService:
    """Runs one worker's state. `look_for_home` is called while the home store cannot be reached."""

    state: WorkerState

    def __init__(
        self,
        state: WorkerState,
        *,
        look_for_home: Callable[[], None] = lambda: None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.streams = GatewayStreams(self._gateway_lost)
        self.is_draining = False
        self._look_for_home = look_for_home
        self._tracer = tracer or Tracer()
        self._clock = clock
        self._operations = Operations(self.post)
        self._timer = Timer(lambda: self.post(Tick()), clock)
        self._idle = asyncio.Event()
        self._idle.set()
        self._performers: Mapping[type[Action], Callable[[Any], object]] = {
            Fail: self._send_failure,
            **self._role_performers(),
        }

    def _role_performers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        """Returns the functions that perform the role's actions, by action type."""
        raise NotImplementedError

    def _starts(self, operation: Callable[[Any], Operation]) -> Callable[[Any], object]:
        """Returns a performer that starts an action as an operation."""
        return lambda action: self._operations.start(operation(action))

    # -- life cycle

    @property
    def failed(self) -> asyncio.Future[None]:
        """Future that gets the exception when a bug stops the worker."""
        return self._operations.failed

    @property
    def is_idle(self) -> bool:
        """True if no request is here."""
        return self._idle.is_set()

    async def drained(self) -> None:
        """Waits until no request is here."""
        await self._idle.wait()

    def drain(self, draining: bool) -> None:
        """Sets whether new requests are refused."""
        self.is_draining = draining

    async def finish(self) -> None:
        """Fails the remaining requests if possible. Afterwards peers do not write to the pool any more."""

    async def stop(self) -> None:
        """Cancels all operations. The caller closes the transfer engine and the engine thread."""
        self._timer.set(None)
        self.streams.close()
        await self._operations.stop()

    # -- events in, actions out

    def post(self, event: Event) -> None:
        """Handles an event and performs the resulting actions at once."""
        for action in self.state.handle(event, self._clock()):
            self._performers[type(action)](action)
        self._timer.set(self.state.wake_at)
        if self.state.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    def home_found(self, store: Endpoint) -> None:
        self.post(StoreFound(store=store))

    def _gateway_lost(self, gateway_id: GatewayId) -> None:
        log.warning("gateway %s is gone; its requests end", gateway_id)
        self.post(GatewayLost(gateway_id=gateway_id))

    def _send_failure(self, action: Fail) -> None:
        level = logging.DEBUG if isinstance(action.error, Cancelled) else logging.WARNING
        log.log(level, "given up: %s", action.error.message, extra=of(action.request_id))
        self.streams.send(action.gateway_id, failures=[(action.request_id, action.error)])

    # -- figures

    def load(self) -> conductor_pb2.Load:
        """Returns the load for heartbeats and GetStatus."""
        state, pool = self.state, self.state.pool
        return conductor_pb2.Load(
            num_waiting=state.num_waiting,
            num_running=state.num_running,
            free_blocks=pool.num_free,
            held_blocks=state.num_held_blocks,
            num_blocks=pool.capacity,
        )

    def status(self) -> worker_pb2.WorkerStatus:
        """Returns the status for operators, tests and metrics."""
        pool = self.state.pool
        return worker_pb2.WorkerStatus(
            load=self.load(),
            num_blocks=pool.num_blocks,
            cached_blocks=pool.num_cached,
            counters=self.state.counted(),
        )


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Implements the `Worker` service for gateways. `Submit` is refused; prefill workers override it."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        raise InvalidRequest("this is a decode worker; submit to a prefill worker", request=request.request_id)

    async def Cancel(self, request: worker_pb2.CancelRequest, context: Context) -> worker_pb2.CancelReply:
        self._service.post(RequestCancelled(request_id=RequestId(request.request_id)))
        return worker_pb2.CancelReply()

    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> AsyncIterator[worker_pb2.EventBatch]:
        async for batch in self._service.streams.events(GatewayId(request.gateway_id)):
            yield batch

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Context) -> worker_pb2.WorkerStatus:
        return self._service.status()
