"""Life of one request at the gateway, from its first placement to its last token, across losses.

    PAUSED ⇄ PLACING → PREFILLING → DECODING → FINISHED
                ↑          │            │
                └──────────┴────────────┘          any → FAILED

Rule: the client receives each token index exactly once and in order (`ordered_tokens`); a missing token is a loss.
After a loss the request continues elsewhere from its prompt and the tokens emitted so far. It fails after repeated
losses without progress, so that a request that breaks its worker does not break every worker. A worker that is taken
out of service in an orderly way does not count as a loss.

Pure: events in, actions out. This module does not know HTTP, gRPC, tokenizers or the clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from moonserve.gateway.cluster.avoided_instances import AvoidedInstances, suspects
from moonserve.gateway.generation.events import (
    Aborted,
    Action,
    CancelAttempt,
    Event,
    Fail,
    InstanceLost,
    Pause,
    Place,
    Placed,
    PlaceDue,
    PlaceFailed,
    Report,
    Reported,
    Submit,
    SubmitFailed,
    TokensArrived,
    WorkerFailed,
)
from moonserve.gateway.generation.ordered_tokens import OrderedTokens
from moonserve.gateway.text.detokenizer import TextOutput
from moonserve.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    IntegrityError,
    MoonserveError,
    NotLeader,
    NoWorker,
    Overloaded,
    PeerLost,
)
from moonserve.protocol.request import (
    DecodeReport,
    Placement,
    PrefillReport,
    RequestId,
    RequestPhase,
    SamplingParams,
    Token,
)

MAX_ATTEMPTS = 3  # losses after which a request fails, without progress in between
_PROGRESS_TOKENS = 16  # tokens that an attempt must produce to count as progress

# A killed worker's restart: import of torch, loading of weights, registration, the conductor's lease.
PATIENCE_S = 20.0
_PAUSE_S = 0.25


class Phase(StrEnum):
    """Phase of a request."""

    PLACING = "placing"
    PAUSED = "paused"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


LIVE = frozenset({Phase.PLACING, Phase.PAUSED, Phase.PREFILLING, Phase.DECODING})
_WITH_WORKERS = frozenset({Phase.PREFILLING, Phase.DECODING})


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """Life of one choice of one prompt."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    output: TextOutput
    deadline_at: float
    index: int = 0  # position of the choice in the reply
    num_known: int = 0  # number of first tokens that the client already has, from a stream that broke off
    patience_s: float = PATIENCE_S  # time to wait while no worker or no conductor is there

    phase: Phase = Phase.PAUSED
    attempt: int = 1
    losses: int = 0  # broken attempts since the last one that made progress
    ordered_tokens: OrderedTokens = field(init=False)
    last_token: Token | None = None  # set in FINISHED, if no stop string ended the choice
    placement: Placement | None = None  # set in PREFILLING and DECODING; then the last one
    placed_at: float = 0.0  # time of the placement
    report: PrefillReport | None = None  # of the first attempt that sent one
    last_report: PrefillReport | None = None  # of the current attempt
    decode_report: DecodeReport | None = None  # of the current attempt
    avoided: AvoidedInstances = field(default_factory=AvoidedInstances)
    retry_deadline: float | None = None  # end of patience; set from the first failed placement to the next token
    last_loss: MoonserveError | None = None  # why the attempt before the current one was lost
    error: MoonserveError | None = None  # set in FAILED

    def __post_init__(self) -> None:
        self.ordered_tokens = OrderedTokens(self.output, self.index, self.num_known)

    @property
    def generated(self) -> list[int]:
        """Ids of the tokens emitted, in index order."""
        return self.ordered_tokens.generated

    @property
    def attempt_id(self) -> RequestId:
        """Id of the current attempt in the cluster."""
        return attempt_id(self.request_id, self.attempt)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens whose KV was reused, as far as reported."""
        return min(self.report.cached_tokens, len(self.prompt)) if self.report else 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Applies `event` and returns the actions. Events of a finished request or an earlier attempt are ignored."""
        if getattr(event, "attempt", self.attempt) != self.attempt:
            return []
        if self.phase not in LIVE:
            return self._return_late_placement(event)
        handler: Callable[[RequestState, Event, float], list[Action]] = _HANDLERS[type(event)]
        return handler(self, event, now)

    def validate(self) -> None:
        """Raises AssertionError if the state contradicts itself."""
        self.ordered_tokens.validate(self.sampling.max_tokens)
        assert self.attempt >= 1
        assert 0 <= self.losses <= MAX_ATTEMPTS
        assert (self.phase is Phase.FAILED) == (self.error is not None)
        assert self.phase not in _WITH_WORKERS or self.placement is not None
        assert not self.ordered_tokens.awaits_first or self.phase is Phase.PREFILLING
        self.avoided.validate()

    # Placing

    def _on_place_due(self, event: PlaceDue, now: float) -> list[Action]:
        return self._place(now) if self.phase is Phase.PAUSED else []

    def _place(self, now: float) -> list[Action]:
        self.phase = Phase.PLACING
        if now >= self.deadline_at:
            return self._fail(DeadlineExceeded("the request took longer than its time limit"), now)
        self.ordered_tokens.begin_attempt()
        return [
            Place(
                attempt=self.attempt,
                request_id=self.attempt_id,
                token_ids=self._tokens(),
                max_tokens=self.sampling.max_tokens - len(self.generated),
                excluded=self.avoided.incarnations,
                timeout_s=self.deadline_at - now,
            )
        ]

    def _on_placed(self, event: Placed, now: float) -> list[Action]:
        if self.phase is not Phase.PLACING:
            return []
        self.avoided.connected(event.open_since)
        # Other workers may register, or these may return; waiting does not count as an attempt.
        away = event.replaced or self.avoided.dead_among(event.placement, now)
        if away:
            why = "was replaced during the placement" if event.replaced else "is lost and has not returned yet"
            error = NoWorker(f"{', '.join(sorted(away))} {why}")
            return [self._release_placement(), *self._pause(error, now)]
        self.phase = Phase.PREFILLING
        self.placement, self.placed_at = event.placement, now
        return [
            Submit(
                attempt=self.attempt,
                request_id=self.attempt_id,
                token_ids=self._tokens(),
                placement=event.placement,
                timeout_s=max(0.001, self.deadline_at - now),
            )
        ]

    def _on_place_failed(self, event: PlaceFailed, now: float) -> list[Action]:
        if self.phase is not Phase.PLACING:
            return []
        self.avoided.connected(event.open_since)
        may_recover = isinstance(event.error, PeerLost | NotLeader) or (
            self.attempt > 1 and isinstance(event.error, NoWorker | Overloaded)
        )
        may_recover |= event.may_return and isinstance(event.error, NoWorker)
        if not may_recover:
            return self._fail(event.error, now)
        if isinstance(event.error, NoWorker):
            self.avoided.forgive_failed(now)
        return self._pause(event.error, now)

    def _pause(self, error: MoonserveError, now: float) -> list[Action]:
        """Schedules another placement until patience ends."""
        if self.retry_deadline is None:
            self.retry_deadline = now + self.patience_s
        if now >= self.retry_deadline:
            return self._fail(error, now)
        self.phase = Phase.PAUSED
        return [Pause(attempt=self.attempt, delay_s=_PAUSE_S)]

    # Tokens

    def _on_reported(self, event: Reported, now: float) -> list[Action]:
        if isinstance(event.report, DecodeReport):
            self.decode_report = event.report
        else:
            self.last_report = event.report
            self.report = self.report or event.report
        return []

    def _on_tokens(self, event: TokensArrived, now: float) -> list[Action]:
        if self.phase not in _WITH_WORKERS:
            return []
        accepted = self.ordered_tokens.in_order(event.tokens)
        if accepted is None:
            return self._lose(IntegrityError("a token was lost between worker and gateway"), now)
        return self._emit(accepted, now) if accepted else []

    def _emit(self, tokens: list[Token], now: float) -> list[Action]:
        actions: list[Action] = []
        is_first = self.ordered_tokens.num_attempt_tokens == 0
        accepted = self.ordered_tokens.accept(tokens)
        self.phase = Phase.DECODING
        if is_first:
            self.retry_deadline = None
            actions.append(self._report(RequestPhase.FIRST_TOKEN, now))
        actions += accepted
        if accepted[-1].finish_reason is not None:
            self.phase = Phase.FINISHED
            self.last_token = tokens[-1]
            actions.append(self._report(RequestPhase.FINISHED, now))
            if self.output.stopped:
                actions.append(self._cancel())
        return actions

    # Losses

    def _on_submit_failed(self, event: SubmitFailed, now: float) -> list[Action]:
        if self.placement is None or self.phase is not Phase.PREFILLING:
            return []
        return self._lose(event.error, now, {self.placement.prefill.instance_id})

    def _on_worker_failed(self, event: WorkerFailed, now: float) -> list[Action]:
        if self.placement is None or self.phase not in _WITH_WORKERS:
            return []
        return self._lose(event.error, now, suspects(event.instance_id, event.error, self.placement))

    def _on_instance_lost(self, event: InstanceLost, now: float) -> list[Action]:
        if self.placement is None or self.phase not in _WITH_WORKERS:
            return []
        if event.instance_id == self.placement.decode.instance_id:
            return self._lose(event.error, now, {event.instance_id})
        is_prefill = event.instance_id == self.placement.prefill.instance_id
        # With the second token of the attempt the handoff is complete and the prefill worker is no longer needed.
        if is_prefill and self.ordered_tokens.num_attempt_tokens < 2:
            return self._lose(event.error, now, {event.instance_id})
        return []

    def _on_aborted(self, event: Aborted, now: float) -> list[Action]:
        return self._fail(event.error, now)

    def _lose(self, error: MoonserveError, now: float, excluded: set[str] | None = None) -> list[Action]:
        """Ends the attempt and requests a new placement if that may help."""
        if self.ordered_tokens.num_attempt_tokens >= _PROGRESS_TOKENS:
            self.losses = 0
        self.losses += not isinstance(error, NoWorker)
        if not error.retryable or self.losses == MAX_ATTEMPTS:
            return self._fail(error, now)
        actions: list[Action] = [self._cancel(), self._report(RequestPhase.FAILED, now)]
        self._avoid(error, excluded or set(), now)
        self.attempt += 1
        self.last_loss = error
        self.last_report = self.decode_report = None
        return [*actions, *self._place(now)]

    def _avoid(self, error: MoonserveError, at_fault: set[str], now: float) -> None:
        if self.placement is None:
            return
        for endpoint in (self.placement.prefill, self.placement.decode):
            if endpoint.instance_id in at_fault:
                self.avoided.add(endpoint, now, broke=isinstance(error, PeerLost))

    def _fail(self, error: MoonserveError, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.phase in _WITH_WORKERS:
            left = isinstance(error, Cancelled)
            actions.append(self._cancel())
            actions.append(self._report(RequestPhase.CANCELLED if left else RequestPhase.FAILED, now))
        self.phase, self.error = Phase.FAILED, error
        self.ordered_tokens.discard_early()
        return [*actions, Fail(error=error)]

    def _return_late_placement(self, event: Event) -> list[Action]:
        """Hands back a placement that arrived after the failure, because the conductor counts its load."""
        if self.phase is not Phase.FAILED or not isinstance(event, Placed):
            return []
        return [self._release_placement()]

    # Pieces

    def _tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.generated)

    def _cancel(self) -> CancelAttempt:
        placement = self.placement
        endpoints = dict.fromkeys((placement.prefill, placement.decode)) if placement else ()
        return CancelAttempt(request_id=self.attempt_id, endpoints=tuple(endpoints))

    def _release_placement(self) -> Report:
        """Reports that a placement was not used."""
        return Report(request_id=self.attempt_id, phase=RequestPhase.CANCELLED)

    def _report(self, phase: RequestPhase, now: float) -> Report:
        return Report(
            request_id=self.attempt_id,
            phase=phase,
            elapsed_s=now - self.placed_at if self.placement else 0.0,
            cached_tokens=self.cached_tokens,
            output_tokens=self.ordered_tokens.num_attempt_tokens,
            num_draft_tokens=0 if self.last_token is None else self.last_token.num_draft_tokens,
            num_accepted_tokens=0 if self.last_token is None else self.last_token.num_accepted_tokens,
            prefill=self.last_report,
        )


def choice_id(request_id: str, index: int) -> RequestId:
    """Returns the cluster-wide id of one choice of a request."""
    return RequestId(f"{request_id}.{index}" if index else request_id)


def attempt_id(request_id: RequestId, attempt: int) -> RequestId:
    """Returns the id of one attempt. Workers remember cancelled ids for a while, so each attempt needs its own."""
    return request_id if attempt == 1 else RequestId(f"{request_id}~{attempt}")


# One row per event. Typed loosely because each handler takes its own event class.
_HANDLERS: dict[type, Callable[..., list[Action]]] = {
    PlaceDue: RequestState._on_place_due,
    Placed: RequestState._on_placed,
    PlaceFailed: RequestState._on_place_failed,
    SubmitFailed: RequestState._on_submit_failed,
    TokensArrived: RequestState._on_tokens,
    Reported: RequestState._on_reported,
    WorkerFailed: RequestState._on_worker_failed,
    InstanceLost: RequestState._on_instance_lost,
    Aborted: RequestState._on_aborted,
}
