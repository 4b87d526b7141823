"""One generation's share of the metrics: what is counted, and when. Times are the gateway's own monotonic clock."""

from __future__ import annotations

from gateway.cluster.figures import Ended, Figures
from protocol.errors import MoonserveError, Overloaded
from protocol.metrics import RequestMetrics
from protocol.request import FinishReason, PrefillReport


class Timings:
    """Follows one generation; exactly one of `finished` and `failed` ends it."""

    def __init__(
        self, request_id: str, metrics: RequestMetrics, figures: Figures, arrived_at: float
    ) -> None:
        self._request_id = request_id
        self._metrics = metrics
        self._figures = figures
        self._arrived_at = arrived_at
        self._first_at: float | None = None
        self._last_at = arrived_at
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_tokens = 0

    def accepted(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._metrics.waiting.inc()
        self._figures.totals["requests"] += 1
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.prompt_length.observe(num_prompt_tokens)

    def tokens(self, count: int, now: float, report: PrefillReport | None) -> None:
        """`count` tokens arrived together: one gap, then none."""
        metrics = self._metrics
        metrics.generation_tokens.add(count)
        self._num_tokens += count
        self._figures.totals["output_tokens"] += count
        if self._first_at is None:
            self._begin_decoding(now, report)
            count -= 1
        elif count:
            metrics.inter_token_s.add(now - self._last_at)
            self._figures.gaps.add(now - self._last_at, now)
            count -= 1
        if count:
            metrics.inter_token_s.add(0.0, count)
        self._last_at = now

    def retried(self) -> None:
        self._metrics.retries.inc()

    def finished(self, reason: FinishReason, num_tokens: int, now: float) -> None:
        metrics = self._metrics
        metrics.running.dec()
        self._figures.totals["finished"] += 1
        metrics.succeeded(reason.value)
        metrics.e2e_s.observe(now - self._arrived_at)
        metrics.generation_length.observe(num_tokens)
        if self._first_at is not None:
            metrics.decode_s.observe(now - self._first_at)
        self._ended(reason.value, now)

    def failed(self, error: MoonserveError, now: float) -> None:
        (self._metrics.waiting if self._first_at is None else self._metrics.running).dec()
        self._metrics.failed(error.code)
        if isinstance(error, Overloaded):
            self._figures.rejections[error.message] += 1
        else:
            self._figures.failures[error.code] += 1
        self._ended(error.code, now)

    def _ended(self, outcome: str, now: float) -> None:
        first_at, arrived_at = self._first_at, self._arrived_at
        self._figures.ended(
            Ended(
                request_id=self._request_id,
                outcome=outcome,
                prompt_tokens=self._num_prompt_tokens,
                cached_tokens=self._num_cached_tokens,
                output_tokens=self._num_tokens,
                ttft_s=None if first_at is None else first_at - arrived_at,
                e2e_s=now - arrived_at,
            )
        )

    def _begin_decoding(self, now: float, report: PrefillReport | None) -> None:
        metrics = self._metrics
        self._first_at = now
        metrics.waiting.dec()
        metrics.running.inc()
        metrics.ttft_s.observe(now - self._arrived_at)
        self._figures.ttft.add(now - self._arrived_at, now)
        if report is not None:
            metrics.queue_s.observe(report.queue_s)
            metrics.prefill_s.observe(report.load_s + report.compute_s)
            metrics.prefix_queries.inc(self._num_prompt_tokens)
            cached = self._num_cached_tokens = min(report.cached_tokens, self._num_prompt_tokens)
            metrics.prefix_hits.inc(cached)
            self._figures.totals["prompt_tokens"] += self._num_prompt_tokens
            self._figures.totals["cached_tokens"] += cached
