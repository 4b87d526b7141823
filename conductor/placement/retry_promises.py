"""Promises to rejected requests: a `Retry-After` at which the retry will be admitted. Pure; `now` in monotonic seconds.

Under lasting overload a retry meets as many new requests as before, and would be rejected again however long it waited.
So each rejection takes the next free place in a virtual queue (`VirtualQueue`). Its `Retry-After` is the moment at
which all requests before it have been served, at the rate of admissions. Until they have returned, new requests are
admitted only while there is room to spare (`NEWCOMER_TTFT_SHARE`), which is the capacity of requests that do not
return. The share that returns is learned, and later rejections get places in between accordingly. In teletraffic this
is trunk reservation for overflow.

A request is recognized by its ticket, a digest of the request and its client, so clients need not cooperate. A retry
before its time keeps its place and gains nothing.

    unknown ── rejected ──► promised ── retried when due ──► (unknown; judged by the objectives alone)
                               └── no retry within GRACE_S ──► unknown
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from moonserve.conductor.placement.admission import LOAD_REASONS, RETURNS_FIRST, STEP_SHARE
from moonserve.conductor.placement.decision import Decision, Rejection

NEWCOMER_TTFT_SHARE = 0.25
"""Share of the queue allowed by the TTFT objective that may be in use when a new request is admitted while others are
to return. The rest is reserved for those. A share of 0.5 would reserve nothing: by its price, the policy `moonserve`
puts no prompt of a tenth of the objective into a longer queue."""
NEWCOMER_TBT_SHARE = 0.9
"""The same share of the TBT objective. A decode step has a minimum duration, so half of it may be unreachable."""
PACE = 0.75
"""Share of the observed admission rate that is promised. Promises cannot be withdrawn when the cluster slows down, and
arrivals are less even than promises. The remainder is available to new requests."""
SPREAD = 0.2
"""Largest delay of a promise beyond its place, as a share of its wait. `Retry-After` has whole seconds, so without a
spread, requests rejected within a moment would all return in one moment and leave the rest of the second idle."""
EARLY_S = 0.1
"""Tolerance for clocks and networks. `Retry-After` is rounded up to seconds, so no retry comes much too early."""
GRACE_S = 10.0
"""Wait for a late retry: covers rounding, a slow client and a second try after a lost reply."""
MAX_PROMISES = 100_000
# Observations in a mean: gaps deviate by as much as their mean, and returns are all-or-nothing, perhaps one of four.
_MAX_MEAN_WEIGHT = 256
_INITIAL_MEAN_WEIGHT = 16  # observations that an initial or outdated value counts as
_LEAST_SHARE = 0.05


class VirtualQueue:
    """The virtual queue: the number of places taken in each coming second.

    A place takes as much of a second as its request is *expected* to take. That changes after places are given: if only
    one of four requests returns, three quarters of all promised time is free again, and the next rejection gets a place
    in between. VirtualQueue already given are kept, since their `Retry-After` was sent. A place longer than a second
    keeps the following seconds free.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)  # by second; past seconds are removed
        self._second = 0  # of the last call
        self._carried_s = 0.0  # time that places of past seconds take from `_second` on
        self._first = 0  # the first second that may have room, as of the beginning of `_second`
        self._left_s = 0.0  # time that places of seconds before `_first` take from `_first` on

    def take(self, earliest_at: float, place_s: float, now: float) -> float:
        """Takes the first free place of `place_s` that ends no sooner than `earliest_at`, and returns its end."""
        self._turn_to(int(now), place_s)
        second, left_s = self._first, self._left_s
        while True:
            count = self._counts.get(second, 0)
            begun_s = left_s + count * place_s
            if second == self._second:
                begun_s = max(begun_s, now - second)
            has_room = begun_s + place_s <= max(1.0, place_s)
            if has_room and earliest_at <= second + 1:
                break
            second, left_s = second + 1, max(0.0, begun_s - 1.0)
            if not has_room:  # it stays full until the next `_turn_to`
                self._first, self._left_s = second, left_s
        self._counts[second] += 1
        return max(earliest_at, second + begun_s + place_s)

    def clear(self) -> None:
        """Frees all places."""
        self._counts.clear()
        self._first, self._left_s, self._carried_s = self._second, 0.0, 0.0

    def _turn_to(self, second: int, place_s: float) -> None:
        """Resets the search for room once a second, since places may have become shorter. Time that places of past
        seconds take from the current one stays taken."""
        if second == self._second:
            return
        at, left_s = self._second, self._carried_s
        for past in sorted(each for each in self._counts if each < second):
            left_s = max(0.0, left_s - (past - at)) + self._counts.pop(past) * place_s
            at = past
        self._carried_s = max(0.0, left_s - (second - at))
        self._second = self._first = second
        self._left_s = self._carried_s


@dataclass(slots=True)
class RunningMean:
    """Running mean of all observations; in the long run, of about the last `_MAX_MEAN_WEIGHT`."""

    value: float
    weight: int = _INITIAL_MEAN_WEIGHT

    def observe(self, newest: float) -> None:
        self.weight = min(self.weight + 1, _MAX_MEAN_WEIGHT)
        self.value += (newest - self.value) / self.weight


class RetryPromises:
    """Makes promises to rejected requests and keeps them, by ticket."""

    def __init__(self) -> None:
        self._due_at: dict[bytes, float] = {}
        self._in_order: list[tuple[float, bytes]] = []  # heap of the promises, and of some that are over
        self._places = VirtualQueue()  # a promise may be later than its place
        self._gap_s = RunningMean(0.0)  # between admissions, while others are to return
        self._admitted_at: float | None = None
        self._share = RunningMean(1.0)  # share of promised requests that return

    def __len__(self) -> int:
        return len(self._due_at)

    def final_decision(self, decision: Decision, ticket: bytes, now: float) -> Decision:
        """Returns the decision with its final rejection: with the promised `Retry-After`, or in favour of promised
        requests, or none. Unchanged if there is no ticket."""
        if not ticket:
            return decision
        rejection = self.final_rejection(
            ticket,
            decision.rejection,
            is_crowded=_is_crowded(decision),
            service_s=_service_s(decision),
            horizon_s=decision.ttft_slo_s,
            now=now,
        )
        return replace(decision, rejection=rejection)

    def final_rejection(
        self,
        ticket: bytes,
        rejection: Rejection | None,
        *,
        is_crowded: bool,
        service_s: float,
        horizon_s: float,
        now: float,
    ) -> Rejection | None:
        """Returns the final rejection, or None to admit. `is_crowded`: the objectives would be met, but with little
        room to spare. `service_s`: estimated cluster time per request, until the admission rate is learned.
        `horizon_s`: room is reserved for promises that are due within this time."""
        self._drop_late(now)
        is_due = now >= self._due_at.get(ticket, float("inf")) - EARLY_S
        if is_due:  # counts as returned even if rejected now: else more rejections would make places shorter
            del self._due_at[ticket]
            self._share.observe(1.0)
        is_expecting = bool(self._in_order) and self._in_order[0][0] <= now + horizon_s
        if rejection is None and (is_due or not is_crowded or not is_expecting):
            self._admit(ticket, now)
            return None
        if rejection is not None and rejection.reason not in LOAD_REASONS:
            return rejection
        reason = RETURNS_FIRST if rejection is None else rejection.reason
        earliest_s = service_s if rejection is None else rejection.retry_after_s
        return Rejection(
            reason=reason,
            retry_after_s=self._promise(ticket, now + earliest_s, service_s, now) - now,
        )

    def validate(self) -> None:
        """Raises AssertionError if a promise would never end."""
        promises = {(due_at, ticket) for ticket, due_at in self._due_at.items()}
        assert promises <= set(self._in_order)
        assert len(promises) <= MAX_PROMISES
        assert 0.0 <= self._share.value <= 1.0

    def _promise(self, ticket: bytes, earliest_at: float, service_s: float, now: float) -> float:
        """Returns when the request may return. A promise that is not due yet is repeated."""
        if ticket in self._due_at:
            return self._due_at[ticket]
        if not self._due_at:
            self._places.clear()
            # Earlier admissions filled an empty queue and say nothing about the sustainable rate.
            self._gap_s = RunningMean(max(self._gap_s.value, service_s))
        place_s = self._gap_s.value * max(_LEAST_SHARE, self._share.value) / PACE
        due_at = self._places.take(earliest_at, place_s, now)
        due_at += SPREAD * ticket[-1] / 256 * (due_at - now)
        if len(self._in_order) < MAX_PROMISES:
            self._due_at[ticket] = due_at
            heappush(self._in_order, (due_at, ticket))
        return due_at

    def _admit(self, ticket: bytes, now: float) -> None:
        if self._admitted_at is not None and self._due_at:
            self._gap_s.observe(now - self._admitted_at)
        self._admitted_at = now if self._due_at else None
        self._due_at.pop(ticket, None)

    def _drop_late(self, now: float) -> None:
        """Drops promises whose requests did not return, and heap entries of requests that did."""
        while self._in_order:
            due_at, ticket = self._in_order[0]
            is_kept = self._due_at.get(ticket) == due_at
            if is_kept and due_at + GRACE_S > now:
                return
            heappop(self._in_order)
            if is_kept:
                del self._due_at[ticket]
                self._share.observe(0.0)


def _is_crowded(decision: Decision) -> bool:
    queue_s = float(decision.prefill_columns.queue_s.min())
    beside_s = decision.predicted_ttft_s - queue_s
    return (
        queue_s > NEWCOMER_TTFT_SHARE * (decision.ttft_slo_s - beside_s)
        or decision.predicted_tbt_s > NEWCOMER_TBT_SHARE * STEP_SHARE * decision.tbt_slo_s
    )


def _service_s(decision: Decision) -> float:
    """Returns the prefill time per request of the whole cluster. If decode is the bottleneck, observed gaps show it."""
    prefills = decision.prefill_columns.prefill_s
    return float(prefills.mean()) / len(prefills)
