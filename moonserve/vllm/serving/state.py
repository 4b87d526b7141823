"""Requests of a worker whose engine is vLLM, of either role. Pure: events in, actions out.

    GENERATING → ended                       a decode worker, or an answer of one token
    GENERATING → HANDING_OFF → ended         a prefill worker

vLLM queues, schedules and preempts; this state owns what the cluster promises: each request ends in a last token, a
handoff or a failure; a request id is accepted once; a cancellation that comes first holds; deadlines and lost gateways
end requests. It does not know vLLM, KV or sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from moonserve.protocol.errors import Cancelled, DeadlineExceeded, InvalidRequest, MoonserveError, NoWorker, PeerError
from moonserve.protocol.request import DecodeReport, Endpoint, GatewayId, PrefillReport, Request, RequestId, Token
from moonserve.worker.alarms_and_tombstones import Alarms, Tombstones
from moonserve.worker.events import Action, Event, Fail, GatewayLost, RequestCancelled, Submitted, Tick


class Phase(StrEnum):
    """Phase of a request."""

    GENERATING = "generating"
    HANDING_OFF = "handing off"


# -- events, in addition to those of every worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(Event):
    """A prefill worker hands a request off to this decode worker."""

    request: Request  # its tokens end with the one that prefill sampled
    kv_transfer_params: str  # JSON for the engine; empty = none
    transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated(Event):
    """The engine generated tokens."""

    request_id: RequestId
    tokens: tuple[Token, ...]
    report: PrefillReport  # meaningful with the first ones
    kv_transfer_params: str = ""  # at the end of a prefill; JSON for the decode worker's engine


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFailed(Event):
    """The engine gave up a request or refused it."""

    request_id: RequestId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOff(Event):
    """The decode worker accepted a request, or not."""

    request_id: RequestId
    error: MoonserveError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Event):
    """The process ends: all requests fail."""


# -- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Action):
    """Generate the request's next tokens. The outcomes are `Generated`, up to a last token, or `GenerationFailed`."""

    request: Request
    is_prefill: bool = False  # only one token, and the engine keeps the KV for another one
    place: float = 0.0  # seconds; requests that wait are scheduled in this order
    kv_transfer_params: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff(Action):
    """Hand the request off to its decode worker; the outcome is `HandedOff`."""

    request: Request  # with the first token
    decode: Endpoint
    kv_transfer_params: str
    transfer_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Action):
    """End the operation of this request that is under way. No event follows."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Action):
    """Send tokens and reports to the gateway."""

    gateway_id: GatewayId
    tokens: tuple[Token, ...]
    prefill: PrefillReport | None = None
    decode: DecodeReport | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Running:
    """A request that is here."""

    request: Request
    deadline_at: float
    decode: Endpoint | None  # who continues after the first token; None = this worker
    transfer_s: float | None  # as the prefill worker measured it; None = submitted here
    phase: Phase = Phase.GENERATING
    num_tokens: int = 0  # generated here
    first_token_at: float = 0.0  # meaningful once num_tokens > 0


class EngineState:
    """All requests of one worker. `handle` takes the time in monotonic seconds."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.is_draining = False
        self._running: dict[RequestId, Running] = {}
        self._alarms = Alarms()
        self._tombstones = Tombstones()
        self._out: list[Action] = []

    # -- figures

    @property
    def is_idle(self) -> bool:
        return not self._running

    @property
    def wake_at(self) -> float | None:
        return self._alarms.next_at

    @property
    def num_waiting(self) -> int:
        """Number of requests without a token."""
        return sum(not each.num_tokens for each in self._running.values())

    @property
    def num_running(self) -> int:
        return len(self._running) - self.num_waiting

    @property
    def queued_tokens(self) -> int:
        """Tokens of requests that have no new one yet."""
        return sum(len(each.request.token_ids) for each in self._running.values() if not each.num_tokens)

    @property
    def context_tokens(self) -> int:
        """Tokens of requests that generate."""
        return sum(len(each.request.token_ids) + each.num_tokens for each in self._running.values() if each.num_tokens)

    def counter_values(self) -> dict[str, int]:
        return dict(self.counters)

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        for request_id, running in self._running.items():
            assert request_id == running.request.request_id
            assert running.phase is Phase.GENERATING or (running.decode is not None and running.num_tokens == 1)
        assert self.counters["accepted"] == len(self._running) + self.counters["ended"]

    # -- events

    def handle(self, event: Event, now: float) -> list[Action]:
        """Applies an event and returns the actions. Outcomes of a request that has ended are ignored."""
        handler: Callable[[EngineState, Any, float], None] = _HANDLERS[type(event)]
        handler(self, event, now)
        actions, self._out = self._out, []
        return actions

    def refusal(self, request_id: RequestId, now: float) -> MoonserveError | None:
        """Returns why a handoff must be refused, or None. One that was accepted before is not."""
        if self._tombstones.has_seen(request_id, now):
            return None
        if self._tombstones.pop(request_id, now):
            self._tombstones.add(request_id, now)
            return Cancelled("the request was cancelled", request=request_id)
        return NoWorker("this decode worker is draining", request=request_id) if self.is_draining else None

    def _on_submitted(self, event: Submitted, now: float) -> None:
        request, placement = event.request, event.placement
        ends_here = placement.is_local_prefill or request.sampling.max_tokens - request.first_index == 1
        decode = None if ends_here else placement.decode  # of a last token, nobody would fetch and release the KV
        generate = Generate(request=request, is_prefill=decode is not None, place=now + placement.rank)
        self._accept(generate, decode, None, now)

    def _on_arrived(self, event: Arrived, now: float) -> None:
        params = event.kv_transfer_params
        generate = Generate(request=event.request, place=now, kv_transfer_params=params)
        self._accept(generate, None, event.transfer_s, now)

    def _accept(self, generate: Generate, decode: Endpoint | None, transfer_s: float | None, now: float) -> None:
        request, request_id = generate.request, generate.request.request_id
        if self._tombstones.has_seen(request_id, now):  # a call that was repeated since its answer was lost
            return
        if self._tombstones.pop(request_id, now):
            self._fail(request, Cancelled("the request was cancelled", request=request_id))
            return
        if request.first_index >= request.sampling.max_tokens:
            self._fail(request, InvalidRequest("all tokens have been generated", request=request_id))
            return
        self._tombstones.remember_request(request_id, now)
        self.counters["accepted"] += 1
        deadline_at = now + request.timeout_s
        self._running[request_id] = Running(
            request=request, decode=decode, deadline_at=deadline_at, transfer_s=transfer_s
        )
        self._alarms.schedule(deadline_at, self._on_deadline, request_id)
        self._out.append(generate)

    def _on_generated(self, event: Generated, now: float) -> None:
        running = self._running.get(event.request_id)
        if running is None:
            return
        prefill = decode = None
        if not running.num_tokens:
            running.first_token_at = now
            if running.transfer_s is None:
                prefill = event.report
            else:
                times = {"transfer_s": running.transfer_s, "queue_s": event.report.queue_s}
                decode = DecodeReport(request_id=event.request_id, **times)
        running.num_tokens += len(event.tokens)
        self.counters["generated_tokens"] += len(event.tokens)
        gateway_id = running.request.gateway_id
        self._out.append(Send(gateway_id=gateway_id, tokens=event.tokens, prefill=prefill, decode=decode))
        if event.tokens and event.tokens[-1].finish_reason is not None:
            self._end(event.request_id, now)
        elif running.decode is not None:
            self._hand_off(running, running.decode, event, now)

    def _hand_off(self, running: Running, decode: Endpoint, event: Generated, now: float) -> None:
        running.phase = Phase.HANDING_OFF
        self._out.append(
            HandOff(
                request=with_tokens(running.request, event.tokens, running.deadline_at - now),
                decode=decode,
                kv_transfer_params=event.kv_transfer_params,
                transfer_s=now - running.first_token_at,
                timeout_s=max(0.0, running.deadline_at - now),
            )
        )

    def _on_generation_failed(self, event: GenerationFailed, now: float) -> None:
        running = self._running.get(event.request_id)
        if running is not None:
            self._fail(running.request, event.error)
            self._end(event.request_id, now)

    def _on_handed_off(self, event: HandedOff, now: float) -> None:
        running = self._running.get(event.request_id)
        if running is None:
            return
        if event.error is None:
            self.counters["handed_off_requests"] += 1
        else:
            self.counters["failed_handoffs"] += 1
            assert running.decode is not None, "only its requests are handed off"
            self._fail(running.request, _as_retryable(event.error, running.decode))
        self._end(event.request_id, now)

    def _on_cancelled(self, event: RequestCancelled, now: float) -> None:
        if event.request_id in self._running:
            self.counters["cancelled_requests"] += 1
            self._abort(event.request_id, now)
        else:
            self._tombstones.add(event.request_id, now)

    def _on_gateway_lost(self, event: GatewayLost, now: float) -> None:
        lost = [name for name, each in self._running.items() if each.request.gateway_id == event.gateway_id]
        for request_id in lost:
            self._abort(request_id, now)

    def _on_stopping(self, _event: Stopping, now: float) -> None:
        for request_id, running in list(self._running.items()):
            self._fail(running.request, NoWorker("this worker stops", request=request_id))
            self._abort(request_id, now)

    def _on_tick(self, _event: Tick, now: float) -> None:
        self._alarms.run_due(now)

    def _on_deadline(self, request_id: RequestId, now: float) -> None:
        running = self._running.get(request_id)
        if running is not None and now >= running.deadline_at:
            text = f"no result within {running.request.timeout_s:g} s"
            self._fail(running.request, DeadlineExceeded(text, request=request_id))
            self._abort(request_id, now)

    # -- ends

    def _abort(self, request_id: RequestId, now: float) -> None:
        self._out.append(Abort(request_id=request_id))
        self._end(request_id, now)

    def _fail(self, request: Request, error: MoonserveError) -> None:
        self._out.append(Fail(gateway_id=request.gateway_id, request_id=request.request_id, error=error))

    def _end(self, request_id: RequestId, now: float) -> None:
        del self._running[request_id]
        self.counters["ended"] += 1
        self._tombstones.remember_request(request_id, now)


def with_tokens(request: Request, tokens: tuple[Token, ...], timeout_s: float) -> Request:
    """Returns the request as it is after these tokens. Its block keys stay those of the submission."""
    return replace(
        request,
        token_ids=(*request.token_ids, *(token.token_id for token in tokens)),
        timeout_s=max(0.001, timeout_s),
    )


def _as_retryable(error: MoonserveError, decode: Endpoint) -> MoonserveError:
    """Returns a refusal as an error that names the decode worker, since another placement may succeed."""
    if isinstance(error, InvalidRequest):
        return error
    if not error.retryable:
        error = PeerError(f"the decode worker refused: {error.message}", **error.ids)
    error.ids.setdefault("decode", decode.instance_id)
    return error


# One row per event. Typed loosely because each handler takes its own event class.
_HANDLERS: dict[type, Callable[..., None]] = {
    Submitted: EngineState._on_submitted,
    Arrived: EngineState._on_arrived,
    Generated: EngineState._on_generated,
    GenerationFailed: EngineState._on_generation_failed,
    HandedOff: EngineState._on_handed_off,
    RequestCancelled: EngineState._on_cancelled,
    GatewayLost: EngineState._on_gateway_lost,
    Stopping: EngineState._on_stopping,
    Tick: EngineState._on_tick,
}
