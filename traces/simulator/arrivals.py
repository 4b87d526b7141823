"""When requests of a trace reach the machines: after what serving adds, which those of one moment share.

Its rule: a gateway works at all requests that it has by turns, so that those who come at once are all late, the first
one too; what it does not need for that passes beside. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from traces.simulator.clock import Timed
from traces.simulator.events import Arrive, Event
from traces.simulator.journey import Journey
from traces.simulator.spec import Overheads


def arrivals(journeys: Sequence[Journey], overheads: Overheads) -> Iterator[Timed[Event]]:
    """In the trace's order, which is that of their instants. Who comes alone takes `request_s` but for the way back;
    of that the gateway works for `gateway_s`."""
    instants = [journey.record.arrived_s for journey in journeys]
    beside_s = max(overheads.request_s - overheads.back_s - overheads.gateway_s, 0.0)
    for journey, done_at in zip(journeys, by_turns(instants, overheads.gateway_s), strict=True):
        yield Timed(done_at + beside_s, Arrive(journey))


def by_turns(instants: Sequence[float], work_s: float) -> Iterator[float]:
    """When each is done of those who come at `instants`, in order, with the same work, and share one worker evenly.

    Who came first is done first, since all have the same work.
    """
    if work_s <= 0:
        yield from instants
        return
    owed: deque[float] = (
        deque()
    )  # of each who is there: what one who is always there would have got when it is done
    now = given_s = 0.0

    def next_done() -> float:
        return now + (owed[0] - given_s) * len(owed)

    for at in instants:
        while owed and (done_at := next_done()) <= at:
            now, given_s = done_at, owed.popleft()
            yield now
        if owed:
            given_s += (at - now) / len(owed)
        now = at
        owed.append(given_s + work_s)
    while owed:
        now, given_s = next_done(), owed.popleft()
        yield now
