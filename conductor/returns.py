"""When rejected requests should come back, so that those that obey are let in. Pure; `now` in monotonic seconds.

Under lasting overload a rejected request that returns meets as many newcomers as before, and would be rejected again
however long it waited. So each rejection takes the next free place in a queue that exists on paper only (`Places`): its
`Retry-After` is the moment at which all requests before it have been served, at the pace at which requests are let in.
Until these have come, newcomers are let in only while there is room to spare (`NEWCOMER_TTFT_SHARE`), which is what is
left when some do not return. The share that returns is learned, and a later rejection gets a place between theirs. In
teletraffic this is trunk reservation for overflow.

A request is known again by its ticket, a digest of what was asked and by whom, which needs nothing of the client. Who
asks again before its time keeps its place and gains nothing.

    unknown ── rejected ──► promised ── asks when due ──► (unknown; judged by the objectives alone)
                               └── not come within GRACE_S ──► unknown
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from conductor.admission import FOR_LOAD, RETURNS_FIRST, STEP_SHARE
from conductor.decision import Decision, Rejection

NEWCOMER_TTFT_SHARE = 0.25
"""Of what the TTFT objective leaves for a queue, how much may be there for a newcomer to be let in while others are to
return. The rest is theirs; half would not leave any, since the policy `moonserve` has no place for prompts of a tenth
of the objective in queues longer than that (its price)."""
NEWCOMER_TBT_SHARE = 0.9
"""Of the TBT objective. A decode step has a floor, so that half of it may be out of reach."""
PACE = 0.75
"""Of the rate at which requests are let in, what is promised. Promises cannot be taken back when the cluster is slower
than it was, and arrivals are not as even as they are; what is left over is newcomers'."""
SPREAD = 0.2
"""Of its wait, by which a promise is at most later than its place. `Retry-After` is told in whole seconds, so that who
asks within a moment would come back within as short a one, and nobody for the rest of the second."""
EARLY_S = 0.1
"""Clocks and networks; `Retry-After` is rounded up to seconds, so nobody comes much earlier than told."""
GRACE_S = 10.0
"""The rounding, a slow client's start, and a second try after a lost reply."""
MAX_PROMISES = 100_000
# Observations: gaps differ by as much as their mean, and who comes is one of four or not.
_MEMORY = 256
_GUESS = 16  # observations that what is believed at first, or from another time, counts as
_LEAST_SHARE = 0.05


class Places:
    """The queue on paper: how many have a place in each second that comes.

    A place takes as much of a second as its request is *expected* to take. That changes after places were given away:
    where it turns out that one of four comes, three quarters of all that was promised is free again, and the next
    rejection gets a place between those that are there. They keep theirs, since `Retry-After` was told. A place longer
    than a second keeps the seconds behind it free.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)  # by second; those that are over go
        self._second = 0  # of the last call
        self._carried_s = 0.0  # what those that are over take of it and what follows
        self._first = 0  # the first second that may have room, as of the beginning of `_second`
        self._left_s = 0.0  # what those before `_first` leave to it

    def take(self, earliest_at: float, place_s: float, now: float) -> float:
        """The end of the first free place of `place_s` that ends no sooner than `earliest_at`; it is taken."""
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
            if not has_room:  # nor will it have any before the next turn
                self._first, self._left_s = second, left_s
        self._counts[second] += 1
        return max(earliest_at, second + begun_s + place_s)

    def clear(self) -> None:
        """Nobody has a place any more."""
        self._counts.clear()
        self._first, self._left_s, self._carried_s = self._second, 0.0, 0.0

    def _turn_to(self, second: int, place_s: float) -> None:
        """Once a second all is looked at again: places may have become shorter. What those of the seconds that are over
        still take of this one stays taken."""
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
class Mean:
    """Mean of all that was seen; in the long run, of about the last `_MEMORY`."""

    value: float
    weight: int = _GUESS

    def see(self, newest: float) -> None:
        self.weight = min(self.weight + 1, _MEMORY)
        self.value += (newest - self.value) / self.weight


class Returns:
    """Promises by ticket."""

    def __init__(self) -> None:
        self._due_at: dict[bytes, float] = {}
        self._in_order: list[tuple[float, bytes]] = []  # heap of these, and of some that are over
        self._places = Places()  # a promise may be later than its place
        self._gap_s = Mean(0.0)  # between requests that are let in, while others are to return
        self._let_in_at: float | None = None
        self._share = Mean(1.0)  # of those who were promised a return, who came

    def __len__(self) -> int:
        return len(self._due_at)

    def judged(self, decision: Decision, ticket: bytes, now: float) -> Decision:
        """The decision with its rejection as it is told: at its place in the queue, or for the sake of those in it.
        Without a ticket as it was."""
        if not ticket:
            return decision
        rejection = self.judge(
            ticket,
            decision.rejection,
            is_crowded=_is_crowded(decision),
            service_s=_service_s(decision),
            horizon_s=decision.ttft_slo_s,
            now=now,
        )
        return replace(decision, rejection=rejection)

    def judge(
        self,
        ticket: bytes,
        rejection: Rejection | None,
        *,
        is_crowded: bool,
        service_s: float,
        horizon_s: float,
        now: float,
    ) -> Rejection | None:
        """None: let in. `is_crowded`: the objectives would be kept, but with little room to spare. `service_s`: about
        what one request takes of the cluster's time, until it is known better. `horizon_s`: how far ahead those who are
        to return are waited for."""
        self._forget_late(now)
        is_due = now >= self._due_at.get(ticket, float("inf")) - EARLY_S
        if is_due:  # whatever becomes of it now: else places would be given away the more freely the more are refused
            del self._due_at[ticket]
            self._share.see(1.0)
        is_expecting = bool(self._in_order) and self._in_order[0][0] <= now + horizon_s
        if rejection is None and (is_due or not is_crowded or not is_expecting):
            self._let_in(ticket, now)
            return None
        if rejection is not None and rejection.reason not in FOR_LOAD:
            return rejection
        reason = RETURNS_FIRST if rejection is None else rejection.reason
        earliest_s = service_s if rejection is None else rejection.retry_after_s
        return Rejection(
            reason=reason,
            retry_after_s=self._promise(ticket, now + earliest_s, service_s, now) - now,
        )

    def validate(self) -> None:
        """Raises AssertionError where a promise would never end."""
        promises = {(due_at, ticket) for ticket, due_at in self._due_at.items()}
        assert promises <= set(self._in_order)
        assert len(promises) <= MAX_PROMISES
        assert 0.0 <= self._share.value <= 1.0

    def _promise(self, ticket: bytes, earliest_at: float, service_s: float, now: float) -> float:
        """When the request may come back; where it has a promise that is not due yet, that one."""
        if ticket in self._due_at:
            return self._due_at[ticket]
        if not self._due_at:
            self._places.clear()
            # What was let in before filled the queue, and says nothing of its pace.
            self._gap_s = Mean(max(self._gap_s.value, service_s))
        place_s = self._gap_s.value * max(_LEAST_SHARE, self._share.value) / PACE
        due_at = self._places.take(earliest_at, place_s, now)
        due_at += SPREAD * ticket[-1] / 256 * (due_at - now)
        if len(self._in_order) < MAX_PROMISES:
            self._due_at[ticket] = due_at
            heappush(self._in_order, (due_at, ticket))
        return due_at

    def _let_in(self, ticket: bytes, now: float) -> None:
        if self._let_in_at is not None and self._due_at:
            self._gap_s.see(now - self._let_in_at)
        self._let_in_at = now if self._due_at else None
        self._due_at.pop(ticket, None)

    def _forget_late(self, now: float) -> None:
        """Those who did not come, and what is left in the order of those who did."""
        while self._in_order:
            due_at, ticket = self._in_order[0]
            is_kept = self._due_at.get(ticket) == due_at
            if is_kept and due_at + GRACE_S > now:
                return
            heappop(self._in_order)
            if is_kept:
                del self._due_at[ticket]
                self._share.see(0.0)


def _is_crowded(decision: Decision) -> bool:
    queue_s = float(decision.prefill_columns.queue_s.min())
    beside_s = decision.predicted_ttft_s - queue_s
    return (
        queue_s > NEWCOMER_TTFT_SHARE * (decision.ttft_slo_s - beside_s)
        or decision.predicted_tbt_s > NEWCOMER_TBT_SHARE * STEP_SHARE * decision.tbt_slo_s
    )


def _service_s(decision: Decision) -> float:
    """Prefill alone: where decode is what is short, what is observed says so."""
    prefills = decision.prefill_columns.prefill_s
    return float(prefills.mean()) / len(prefills)
