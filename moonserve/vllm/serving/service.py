"""I/O of a worker whose engine is vLLM, and the RPC with which prefill workers hand requests off to decode workers.

Performs the actions of `EngineState` and reports their outcomes to it as events. A generation and a handoff are each an
operation; a request has one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from moonserve.protocol.errors import Incompatible, InvalidRequest, MoonserveError, PeerLost
from moonserve.protocol.kv_blocks import BlockKey, block_keys, root_key
from moonserve.protocol.pb import conductor_pb2, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.tracing import Tracer
from moonserve.protocol.request import Request, RequestId, Role
from moonserve.protocol.rpc.grpc_transport import Channels, Context
from moonserve.protocol.rpc.wire import request_from_wire, to_message
from moonserve.vllm.serving.kv_event_state import KvEventSource
from moonserve.vllm.serving.model_description import EngineFacts
from moonserve.vllm.serving.state import (
    Abort,
    Arrived,
    EngineState,
    Generate,
    Generated,
    GenerationFailed,
    HandedOff,
    HandOff,
    Send,
    Stopping,
)
from moonserve.worker.events import Action, Event
from moonserve.worker.service import Operation, StepLog, WorkerService

# A decode worker answers as soon as it has taken the request over; the KV moves afterwards.
HANDOFF_TIMEOUT_S = 10.0
RETRY_TIMEOUT_S = 5.0


@dataclass(eq=False)
class EngineFigures:
    """Counts of an engine, which it keeps up to date."""

    kv_usage: float = 0.0  # share of the blocks that requests hold
    num_preemptions: int = 0
    num_hit_tokens: int = 0  # of prompts, in the engine's own cache
    num_loaded_tokens: int = 0  # of prompts, that the connector brought
    steps: conductor_pb2.Steps = field(default_factory=conductor_pb2.Steps)  # those without prompt tokens
    log: StepLog = field(default_factory=StepLog)  # empty if the engine does not report its steps
    context_tokens: Callable[[], int] = lambda: 0  # set by the worker: of the requests that generate


class Engine(Protocol):
    """An engine of vLLM's: in this process (`serving.engine`), or behind HTTP (`attached.engine`)."""

    figures: EngineFigures
    facts: EngineFacts
    kv_events: KvEventSource | None  # None = it publishes none

    def generate(self, wanted: Generate, salt: str = "") -> AsyncGenerator[Generated, None]:
        """Yields the request's next tokens, up to its end or, for a prefill, one. Raises InvalidRequest if vLLM refuses
        it and another MoonserveError if the engine fails. Closing the iterator aborts the request."""

    async def died(self) -> None:
        """Waits for the end of the engine. Raises NoWorker."""

    async def reset_prefix_cache(self) -> None:
        """Drops what was cached, such as prompts of measurements."""


class VllmService(WorkerService):
    """The shell of a worker of either role. Call `finish` before `stop`."""

    state: EngineState

    def __init__(
        self,
        engine: Engine,
        role: Role,
        channels: Channels,
        fingerprint: str,
        *,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(EngineState(), tracer=tracer, clock=clock)
        self.fingerprint = fingerprint
        self.steps = engine.figures.log
        self._engine = engine
        self._is_prefill = role is Role.PREFILL
        self._channels = channels
        self._root = root_key(fingerprint)
        engine.figures.context_tokens = lambda: self.state.context_tokens
        self._under_way: dict[RequestId, asyncio.Task[Event | None]] = {}

    def _role_action_handlers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        return {
            Generate: lambda action: self._begin(action.request, self._generate(action)),
            HandOff: lambda action: self._begin(action.request, self._hand_off(action)),
            Abort: self._abort,
            Send: self._send,
        }

    def drain(self, draining: bool) -> None:
        super().drain(draining)
        self.state.is_draining = draining

    async def finish(self) -> None:
        """Fails the remaining requests."""
        if not self.failed.done():
            self.post(Stopping())

    # -- actions

    def _begin(self, request: Request, operation: Operation) -> None:
        task = self._under_way[request.request_id] = self._operations.start(operation)
        task.add_done_callback(lambda done: self._on_done(request.request_id, done))

    def _on_done(self, request_id: RequestId, task: asyncio.Task[Event | None]) -> None:
        if self._under_way.get(request_id) is task:  # a handoff begins before the generation has quite ended
            del self._under_way[request_id]

    def _abort(self, action: Abort) -> None:
        task = self._under_way.pop(action.request_id, None)
        if task is not None:
            task.cancel()

    def _send(self, action: Send) -> None:
        self.streams.send(
            action.gateway_id,
            tokens=action.tokens,
            prefills=() if action.prefill is None else (action.prefill,),
            decodes=() if action.decode is None else (action.decode,),
        )

    async def _generate(self, action: Generate) -> Event | None:
        """Posts what the engine generates."""
        request, started_at, queue_s = action.request, self._clock(), None
        outputs = self._engine.generate(action, salt_of(request, self._root, self._engine.facts.block_size))
        try:
            async with contextlib.aclosing(outputs):
                async for generated in outputs:
                    queue_s = generated.report.queue_s if queue_s is None else queue_s
                    self.post(generated)
        except MoonserveError as error:
            return GenerationFailed(request_id=request.request_id, error=error)
        self._trace(action, queue_s or 0.0, started_at)
        return None

    def _trace(self, action: Generate, queue_s: float, started_at: float) -> None:
        name, parent = "prefill" if self._is_prefill else "decode", action.request.traceparent
        began_at = started_at + queue_s
        self._tracer.span(f"{name} queue", parent, started_at, began_at)
        self._tracer.span(name, parent, began_at, self._clock())

    async def _hand_off(self, action: HandOff) -> Event:
        request_id = action.request.request_id
        message = worker_pb2.HandOffRequest(
            request=to_message(worker_pb2.SubmitRequest, action.request),
            fingerprint=self.fingerprint,
            kv_transfer_params=action.kv_transfer_params,
            transfer_s=action.transfer_s,
        )
        stub = worker_pb2_grpc.EngineHandoffStub(self._channels.to(action.decode.rpc_address))
        timeout_s = max(min(action.timeout_s, HANDOFF_TIMEOUT_S), RETRY_TIMEOUT_S)
        try:
            try:
                await self._channels.call(stub.HandOff, message, timeout_s=timeout_s)
            except PeerLost:  # perhaps only the answer was lost; handoffs are idempotent
                await self._channels.call(stub.HandOff, message, timeout_s=RETRY_TIMEOUT_S)
        except MoonserveError as error:
            return HandedOff(request_id=request_id, error=error)
        return HandedOff(request_id=request_id)

    # -- calls of prefill workers

    def take_over(self, event: Arrived) -> None:
        """Takes a request over; a repeated call has no effect. Raises the error with which it is refused."""
        refusal = self.state.refusal(event.request.request_id, self._clock())
        if refusal is not None:
            raise refusal
        self.post(event)

    # -- figures

    def load(self) -> conductor_pb2.Load:
        figures, total = self._engine.figures, self._engine.facts.num_blocks
        held = min(total, round(figures.kv_usage * total))
        return conductor_pb2.Load(
            num_waiting=self.state.num_waiting,
            num_running=self.state.num_running,
            free_blocks=total - held,
            held_blocks=held,
            num_blocks=total,
            context_tokens=0 if self._is_prefill else self.state.context_tokens,
            queued_tokens=self.state.queued_tokens if self._is_prefill else 0,
            num_preemptions=figures.num_preemptions,
            steps=None if self._is_prefill else figures.steps,
        )

    def status(self) -> worker_pb2.WorkerStatus:
        figures, block_size = self._engine.figures, self._engine.facts.block_size
        found = {
            "device_hit_blocks": figures.num_hit_tokens // block_size,
            "store_hit_blocks": figures.num_loaded_tokens // block_size if self._is_prefill else 0,
            "loaded_tokens": figures.num_loaded_tokens,
        }
        return worker_pb2.WorkerStatus(
            load=self.load(),
            num_blocks=self._engine.facts.num_blocks,
            counters={**self.state.counter_values(), **found},
        )


def salt_of(request: Request, root: BlockKey, block_size: int) -> str:
    """Returns the salt under which vLLM caches the request's blocks: empty unless its keys have a salt.

    Keys start from the tenant's salt, which workers do not know. A salted first key stands for salt and first block
    together, so requests have it in common exactly if they may share blocks."""
    if not request.block_keys:
        return ""
    [unsalted] = block_keys(root, request.token_ids[:block_size], block_size)
    first = request.block_keys[0]
    return "" if first == unsalted else first.hex()


class HandoffServicer(worker_pb2_grpc.EngineHandoffServicer):
    """Serves `EngineHandoff` to prefill workers."""

    def __init__(self, service: VllmService) -> None:
        self._service = service

    async def HandOff(self, request: worker_pb2.HandOffRequest, context: Context) -> worker_pb2.HandOffReply:
        """Takes a request over. Raises Incompatible, InvalidRequest, NoWorker while draining, or Cancelled."""
        if request.fingerprint != self._service.fingerprint:
            raise Incompatible(
                "the prefill worker's model or settings differ from this decode worker's",
                prefill=request.fingerprint,
                decode=self._service.fingerprint,
            )
        try:
            handed = request_from_wire(request.request)
        except ValueError as error:
            raise InvalidRequest(f"malformed handoff: {error}") from error
        if not handed.request_id or not 0 < handed.num_prompt_tokens < len(handed.token_ids):
            raise InvalidRequest("a handoff has an id, a prompt and a token", request=handed.request_id)
        self._service.take_over(
            Arrived(
                request=handed,
                kv_transfer_params=request.kv_transfer_params,
                transfer_s=request.transfer_s,
            )
        )
        return worker_pb2.HandOffReply()
