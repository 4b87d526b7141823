"""The shell around a worker's pure state, its operations, and the gRPC service `Worker`, which also takes submissions.

The shell passes events in, performs actions and reports outcomes. Events are handled one after the other in the event
loop's thread. An action that takes time is an operation, an asyncio task whose outcome is a new event. If it is
cancelled on purpose, the event given for that case is reported. Any other exception is a bug, which ends the worker
instead of leaving a request waiting.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.model.batch import Slice
from moonserve.protocol.errors import Cancelled, InvalidRequest, NoWorker
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import conductor_pb2, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.event_loop import Timer, cancel_all
from moonserve.protocol.process.logs import request_extra
from moonserve.protocol.process.tracing import Tracer
from moonserve.protocol.request import Endpoint, GatewayId, Placement, Request, RequestId, SamplingParams
from moonserve.protocol.rpc.grpc_transport import Context
from moonserve.protocol.rpc.wire import from_message, request_from_wire
from moonserve.worker.events import Action, Event, Fail, GatewayLost, RequestCancelled, StoreFound, Submitted, Tick
from moonserve.worker.token_streams import GatewayStreams

log = logging.getLogger(__name__)

Operation = Coroutine[Any, Any, Event | None]

NUM_LOGGED_STEPS = 512  # several seconds of the shortest steps


class StepLog:
    """The latest steps of a worker's engine, for `GetSteps`. Times are monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[Any, ...]] = deque(maxlen=NUM_LOGGED_STEPS)

    def add(
        self, began_at: float, ended_at: float, sequences: int, prompt: int, decode: int, context: int, waited_s: float
    ) -> None:
        """Adds a step. `prompt` and `decode`: tokens computed; `context`: tokens of all sequences at its end;
        `waited_s`: seconds of the step for which it waited for a prefix."""
        self._steps.append((began_at, ended_at - began_at, waited_s, sequences, prompt, decode, context))

    def add_slices(self, slices: Sequence[Slice], began_at: float, ended_at: float, waited_s: float = 0.0) -> bool:
        """Adds a step of the own engine. Returns True if it computed one token of each sequence."""
        context = sum(each.end for each in slices)
        num_tokens = context - sum(each.start for each in slices)
        prompt = sum(
            each.end - each.start
            for each in slices
            if each.start < each.num_prompt_tokens or each.end - each.start > 1 + each.num_draft
        )
        self.add(began_at, ended_at, len(slices), prompt, num_tokens - prompt, context, waited_s)
        return num_tokens == len(slices)

    def as_message(self) -> worker_pb2.StepLog:
        now, names = self._clock(), [field.name for field in worker_pb2.Step.DESCRIPTOR.fields][1:]
        steps = (worker_pb2.Step(ago_s=now - at, **dict(zip(names, rest, strict=True))) for at, *rest in self._steps)
        return worker_pb2.StepLog(steps=steps)


class Operations:
    """Holds the tasks of one worker. `failed` gets the exception of an operation or report that raises."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self._tasks: set[asyncio.Task[Event | None]] = set()
        self._stopping = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, operation: Operation, *, when_cancelled: Event | None = None) -> asyncio.Task[Event | None]:
        """Starts an operation, whose outcome is reported when it ends."""
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._on_done(done, when_cancelled))
        return task

    def _on_done(self, task: asyncio.Task[Event | None], when_cancelled: Event | None) -> None:
        self._tasks.discard(task)
        if self._stopping:
            return
        if task.cancelled():
            event = when_cancelled
        elif (error := task.exception()) is not None:
            self._fail(error)
            return
        else:
            event = task.result()
        if event is not None:
            try:
                self._report(event)
            except Exception as error:  # the event loop would only log it
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def wait_until_done(self) -> None:
        """Waits until no operation is in flight. Raises the exception of `failed`, if any."""
        while self._tasks and not self.failed.done():
            waited: set[asyncio.Future[Any]] = {*self._tasks, self.failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()

    async def stop(self) -> None:
        """Cancels all operations and waits until they have ended, without reporting their outcomes."""
        self._stopping = True
        await cancel_all(list(self._tasks))
        if self.failed.done():
            self.failed.exception()  # marks it as retrieved, so that asyncio does not log it
        else:
            self.failed.cancel()


class WorkerState(Protocol):
    """Interface of a worker's state, used by the shell."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def wake_at(self) -> float | None: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...

    def handle(self, event: Any, now: float, /) -> Sequence[Action]: ...
    def counter_values(self) -> dict[str, int]: ...


class PoolState(WorkerState, Protocol):
    """Common interface of `PrefillState` and `DecodeState`, which own a block pool."""

    @property
    def pool(self) -> BlockPool: ...
    @property
    def num_held_blocks(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...

    def on_evicted(self, key: BlockKey, /) -> None: ...


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
        self.streams = GatewayStreams(self._on_gateway_lost)
        self.steps = StepLog(clock)
        self.is_draining = False
        self._look_for_home = look_for_home
        self._tracer = tracer or Tracer()
        self._clock = clock
        self._operations = Operations(self.post)
        self._timer = Timer(lambda: self.post(Tick()), clock)
        self._idle = asyncio.Event()
        self._idle.set()
        self._action_handlers: Mapping[type[Action], Callable[[Any], object]] = {
            Fail: self._send_failure,
            **self._role_action_handlers(),
        }

    def _role_action_handlers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        """Returns the functions that perform the role's actions, by action type."""
        raise NotImplementedError

    def _as_operation(self, operation: Callable[[Any], Operation]) -> Callable[[Any], object]:
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
            self._action_handlers[type(action)](action)
        self._timer.set(self.state.wake_at)
        if self.state.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    def home_found(self, store: Endpoint) -> None:
        self.post(StoreFound(store=store))

    def _on_gateway_lost(self, gateway_id: GatewayId) -> None:
        log.warning("gateway %s has gone; cancelling its requests", gateway_id)
        self.post(GatewayLost(gateway_id=gateway_id))

    def _send_failure(self, action: Fail) -> None:
        level = logging.DEBUG if isinstance(action.error, Cancelled) else logging.WARNING
        log.log(level, "the request failed: %s", action.error.message, extra=request_extra(action.request_id))
        self.streams.send(action.gateway_id, failures=[(action.request_id, action.error)])

    # -- figures

    def load(self) -> conductor_pb2.Load:
        """Returns the load for heartbeats and GetStatus."""
        raise NotImplementedError

    def status(self) -> worker_pb2.WorkerStatus:
        """Returns the status for operators, tests and metrics."""
        raise NotImplementedError


class PoolService(WorkerService):
    """Runs the state of a worker that owns a block pool."""

    state: PoolState

    def load(self) -> conductor_pb2.Load:
        state, pool = self.state, self.state.pool
        return conductor_pb2.Load(
            num_waiting=state.num_waiting,
            num_running=state.num_running,
            free_blocks=pool.num_free,
            held_blocks=state.num_held_blocks,
            num_blocks=pool.capacity,
            queued_tokens=state.queued_tokens,
        )

    def status(self) -> worker_pb2.WorkerStatus:
        pool = self.state.pool
        return worker_pb2.WorkerStatus(
            load=self.load(),
            num_blocks=pool.num_blocks,
            cached_blocks=pool.num_cached,
            counters=self.state.counter_values(),
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

    async def GetSteps(self, request: worker_pb2.GetStepsRequest, context: Context) -> worker_pb2.StepLog:
        return self._service.steps.as_message()


class PrefillServicer(WorkerServicer):
    """Serves `Worker` to gateways, including submissions; for prefill workers and local prefill.

    Checks submissions before they become requests, since a malformed one must not fail the step that it shares with
    others.
    """

    def __init__(
        self,
        service: WorkerService,
        *,
        block_size: int,
        vocab_size: int,
        prepare: Callable[[SamplingParams], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` is awaited before a request reaches the service (`EngineThread.prepare`)."""
        super().__init__(service)
        self._prepare = prepare
        self._block_size = block_size
        self._vocab_size = vocab_size

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        """Submits a request. Raises NoWorker while draining, InvalidRequest for a malformed request or grammar."""
        if self._service.is_draining:
            raise NoWorker("this prefill worker is draining", request=request.request_id)
        submitted = self._parse(request)
        placement = from_message(Placement, request.placement)
        if not math.isfinite(placement.rank):
            raise InvalidRequest(f"rank {placement.rank} is not a finite number of seconds", request=request.request_id)
        if self._prepare is not None:
            await self._prepare(submitted.sampling)
        log.debug("accepted: %d tokens", len(submitted.token_ids), extra=request_extra(submitted.request_id))
        self._service.post(Submitted(request=submitted, placement=placement))
        return worker_pb2.SubmitReply()

    def _parse(self, message: worker_pb2.SubmitRequest) -> Request:
        try:
            request = request_from_wire(message)
        except ValueError as error:
            raise InvalidRequest(f"malformed submission: {error}") from error
        num_tokens, num_keys = len(request.token_ids), len(request.block_keys)
        wrong = ""
        if not 0 < request.num_prompt_tokens <= num_tokens:
            wrong = f"{request.num_prompt_tokens} prompt tokens among {num_tokens} tokens"
        elif num_keys != num_tokens // self._block_size:
            wrong = f"{num_keys} block keys for {num_tokens} tokens in blocks of {self._block_size}"
        elif (largest := max(request.token_ids)) >= self._vocab_size:
            wrong = f"token id {largest} is not below the vocabulary's {self._vocab_size}"
        if wrong:
            raise InvalidRequest(wrong, request=request.request_id)
        return request
