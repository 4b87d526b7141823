"""When requests of a trace reach the machines: after what serving adds, one behind the other where they come at once.

Its rule: a gateway works at one request at a time, and what it does not need for that passes beside. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traces.simulator.clock import Timed
from traces.simulator.events import Arrive, Event
from traces.simulator.journey import Journey
from traces.simulator.spec import Overheads


def arrivals(journeys: Sequence[Journey], overheads: Overheads) -> Iterator[Timed[Event]]:
    """In the trace's order, which is that of their instants."""
    free_at = 0.0
    for journey in journeys:
        begun_at = max(journey.record.arrived_s, free_at)
        free_at = begun_at + overheads.gateway_s
        # Also the first token's way back is spent before the machines see a request: to its client that is the same.
        yield Timed(begun_at + overheads.request_s, Arrive(journey))
