"""One choice's way through the cluster as its gateway times it: a ledger at its end, told to metrics and to traces.

Instants are the gateway's; what workers took comes with their reports. Owns when something is measured; what follows
from it is `gateway.ledger`'s.
"""

from __future__ import annotations

import time

from gateway.ledger import Instants, Ledger, ledger
from gateway.state import RequestState
from protocol.metrics import RequestMetrics
from protocol.tracing import Tracer

_clock = time.monotonic  # an event loop's own may be cut to milliseconds


class Journey:
    """From arrival to the last token."""

    def __init__(
        self, metrics: RequestMetrics, tracer: Tracer, traceparent: str, arrived_at: float
    ) -> None:
        """`traceparent`: of the request's span; empty = not traced. `arrived_at`: monotonic seconds."""
        self.traceparent = traceparent
        self.ledger: Ledger | None = None  # once it has ended well
        self._metrics = metrics
        self._tracer = tracer
        self._at = Instants(arrived_at=arrived_at, attempted_at=arrived_at)
        self._attempt = 1

    def placing(self, attempt: int) -> None:
        """The conductor is asked; after a pause within one attempt, again."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._at.attempt(_clock())

    def placed(self) -> None:
        """The prefill worker is asked next."""
        now = _clock()
        self._at.submitted(now)
        if self.traceparent:
            self._tracer.span("placing", self.traceparent, self._at.attempted_at, now)

    def taken(self) -> None:
        """The prefill worker has it."""
        self._at.answered(_clock())

    def tokens(self) -> None:
        """One or more arrived together."""
        self._at.tokens(_clock())

    def finished(self, state: RequestState) -> None:
        """The last token was one of these."""
        self.ledger = ledger(self._at, state.last_report, state.decode_report)
        if self.ledger is not None:
            for phase, seconds in self.ledger.phases().items():
                self._metrics.phases[phase].observe(seconds)
