"""Measurements of one generation: metrics, recent figures, and the duration of its phases.

Instants are on the gateway's own monotonic clock; durations at workers come with their reports.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import InitVar, dataclass, field

from moonserve.gateway.cluster.request_metrics import GATEWAY, RecentFigures, RequestMetrics
from moonserve.gateway.generation.request_state import RequestState
from moonserve.protocol.errors import MoonserveError, Overloaded
from moonserve.protocol.process.tracing import Tracer
from moonserve.protocol.request import DecodeReport, FinishReason, PrefillReport

PHASES = ("retry", "gateway", "queue", "load", "prefill", "transfer", "decode_queue", "decode")
"""Names of the phases, in chronological order."""
_MAX_ARRIVALS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Seconds of one choice. With several attempts, the last one's phases; the earlier attempts are `retry_s`."""

    e2e_s: float  # arrival of the whole request at the gateway to the last token there
    ttft_s: float  # arrival to the first token sent to the client
    retry_s: float  # arrival to the start of the last attempt
    gateway_s: float  # processing and placement, until the prefill worker has accepted the request
    queue_s: float  # at the prefill worker, waiting for landing blocks and for the engine
    load_s: float  # delay from reading the prefix
    prefill_s: float
    transfer_s: float  # first token to the last byte of KV at the decode worker
    decode_queue_s: float  # verification and waiting for a place in the batch
    decode_s: float  # first step to the last token at the gateway; with a single token only its delivery

    @property
    def unaccounted_s(self) -> float:
        """Time in no phase; negative if workers report more time than has passed."""
        return self.e2e_s - sum(self.phases().values())

    def phases(self) -> dict[str, float]:
        """Returns seconds by phase name."""
        return {phase: getattr(self, f"{phase}_s") for phase in PHASES}

    def as_json(self) -> dict[str, float]:
        """Returns all values in seconds, rounded to microseconds."""
        names = ("e2e_s", "ttft_s", *(f"{phase}_s" for phase in PHASES), "unaccounted_s")
        return {name: round(getattr(self, name), 6) for name in names}


@dataclass(slots=True, eq=False, kw_only=True)
class Instants:
    """Instants of one choice, observed by the gateway on its own clock."""

    arrived_at: float
    attempted_at: float  # start of the last attempt
    submitted_at: float | None = None  # when it was sent to the last attempt's prefill worker
    answered_at: float | None = None  # when that worker confirmed it; a token may arrive earlier
    first_at: float | None = None  # first token of all attempts
    handed_at: float | None = None  # first token of the last attempt
    last_at: float | None = None
    arrivals: array[float] = field(default_factory=lambda: array("d"))  # of the first pieces of output

    def attempt(self, now: float) -> None:
        """Starts another attempt."""
        self.attempted_at = now
        self.submitted_at = self.answered_at = self.handed_at = None

    def tokens(self, now: float) -> None:
        """Records the arrival of one or more tokens."""
        if self.first_at is None:
            self.first_at = now
        if self.handed_at is None:
            self.handed_at = now
        self.last_at = now
        if len(self.arrivals) < _MAX_ARRIVALS:
            self.arrivals.append(now)


def phase_times(at: Instants, prefill: PrefillReport | None, decode: DecodeReport | None) -> PhaseTimes | None:
    """Returns the phases of a choice that ended well; None without a token or without a report of its prefill."""
    if prefill is None or at.first_at is None or at.last_at is None or at.submitted_at is None:
        return None
    prefilling_s = prefill.queue_s + prefill.load_s + prefill.compute_s
    landing_s = decode.transfer_s + decode.queue_s if decode is not None else 0.0
    handed_at = at.last_at if at.handed_at is None else at.handed_at
    latest = [handed_at - prefilling_s, at.last_at - prefilling_s - landing_s]
    if at.answered_at is not None:
        latest.append(at.answered_at)
    queued_at = max(at.submitted_at, min(latest))
    return PhaseTimes(
        e2e_s=at.last_at - at.arrived_at,
        ttft_s=at.first_at - at.arrived_at,
        retry_s=at.attempted_at - at.arrived_at,
        gateway_s=queued_at - at.attempted_at,
        queue_s=prefill.queue_s,
        load_s=prefill.load_s,
        prefill_s=prefill.compute_s,
        transfer_s=decode.transfer_s if decode is not None else 0.0,
        decode_queue_s=decode.queue_s if decode is not None else 0.0,
        decode_s=max(0.0, at.last_at - queued_at - prefilling_s - landing_s),
    )


_clock = time.monotonic  # an event loop's own clock may be rounded to milliseconds


@dataclass(slots=True, eq=False)
class RequestTiming:
    """Measures one generation from its arrival. Exactly one of `finished` and `failed` ends it."""

    state: RequestState
    metrics: RequestMetrics
    figures: RecentFigures
    tracer: Tracer
    traceparent: str  # context of the request's span; empty if not traced
    arrived_at: InitVar[float]  # monotonic seconds
    phase_times: PhaseTimes | None = field(default=None, init=False)  # set once the generation has ended well
    _at: Instants = field(init=False)
    _attempt: int = field(default=1, init=False)

    def __post_init__(self, arrived_at: float) -> None:
        self._at = Instants(arrived_at=arrived_at, attempted_at=arrived_at)

    def accepted(self) -> None:
        num_prompt_tokens = len(self.state.prompt)
        self.metrics.waiting.inc()
        self.figures.totals["requests"] += 1
        self.metrics.prompt_tokens.add(num_prompt_tokens)
        self.metrics.prompt_length.add(num_prompt_tokens)

    def placing(self, attempt: int) -> None:
        """Records that a placement is requested; also called again after a pause within one attempt."""
        if attempt != self._attempt:
            self._attempt = attempt
            self.metrics.retries.add(1)
            self._at.attempt(_clock())

    def placed(self) -> None:
        """Records that the placement is known; the prefill worker is next."""
        now = self._at.submitted_at = _clock()
        if self.traceparent:
            self.tracer.span("placing", self.traceparent, self._at.attempted_at, now)

    def prefill_accepted(self) -> None:
        """Records that the prefill worker has accepted the request."""
        self._at.answered_at = _clock()

    def tokens(self, count: int) -> None:
        """Records `count` tokens that arrived together: one gap, then gaps of zero."""
        metrics, now, last_at = self.metrics, _clock(), self._at.last_at
        metrics.generation_tokens.add(count)
        self.figures.totals["output_tokens"] += count
        if last_at is None:
            self._begin_decoding(now)
            count -= 1
        elif count:
            metrics.inter_token_s.add(now - last_at)
            self.figures.gaps.add(now - last_at, now)
            count -= 1
        if count:
            metrics.inter_token_s.add(0.0, count)
        self._at.tokens(now)

    def finished(self, reason: FinishReason) -> None:
        """Records the end after the last token."""
        metrics, state, now = self.metrics, self.state, _clock()
        metrics.running.dec()
        self.figures.totals["finished"] += 1
        metrics.success[reason].inc()
        metrics.e2e_s.add(now - self._at.arrived_at)
        metrics.generation_length.add(len(state.generated))
        if self._at.first_at is not None:
            decode_s, report = now - self._at.first_at, state.last_report
            metrics.decode_s.add(decode_s)
            metrics.tpot_s.add(decode_s / max(1, len(state.generated) - 1))
            if report is not None:
                metrics.inference_s.add(report.load_s + report.compute_s + decode_s)
        self.phase_times = phase_times(self._at, state.last_report, state.decode_report)
        if self.phase_times is not None:
            for phase, seconds in self.phase_times.phases().items():
                metrics.phases[phase].observe(seconds)
                self.figures.phase_s[phase] += seconds
        self._ended(reason.value, now)

    def failed(self, error: MoonserveError) -> None:
        (self.metrics.waiting if self._at.first_at is None else self.metrics.running).dec()
        self.metrics.failures[error.code].inc()
        if isinstance(error, Overloaded):
            self.figures.rejections[error.message] += 1
        else:
            self.figures.failures[error.code] += 1
        self._ended(error.code, _clock())

    def _ended(self, outcome: str, now: float) -> None:
        first_at, arrived_at, state = self._at.first_at, self._at.arrived_at, self.state
        tokens = {
            "prompt_tokens": len(state.prompt),
            "cached_tokens": state.cached_tokens,
            "output_tokens": len(state.generated),
        }
        ttft_s = None if first_at is None else first_at - arrived_at
        arrivals_s = [round(at - arrived_at, 4) for at in self._at.arrivals]
        timing = {**(self.phase_times.as_json() if self.phase_times else {}), "arrivals_s": arrivals_s}
        self.figures.ended(state.request_id, outcome, tokens, ttft_s, now - arrived_at, timing)
        if state.placement is not None:
            self.figures.moved(state.placement.decode.instance_id, GATEWAY, len(state.generated))

    def _begin_decoding(self, now: float) -> None:
        metrics, ttft_s, report = self.metrics, now - self._at.arrived_at, self.state.report
        metrics.waiting.dec()
        metrics.running.inc()
        metrics.ttft_s.add(ttft_s)
        self.figures.ttft.add(ttft_s, now)
        if report is not None:
            metrics.queue_s.add(report.queue_s)
            metrics.prefill_s.add(report.load_s + report.compute_s)
