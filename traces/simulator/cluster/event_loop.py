"""The event loop of virtual time, and the events of a cluster.

The loop pops an event, sets the time, and calls the handler, which *returns* new events. Only the loop has the queue of
future events. Simultaneous events are handled in the order in which they were returned, so a run depends only on its
first events. A handler must recognise obsolete ones.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from moonserve.traces.simulator.cluster.nodes import Node
from moonserve.traces.simulator.cluster.request_state import RequestState
from moonserve.traces.simulator.spec import Fault

E = TypeVar("E")


class TimedEvent(NamedTuple, Generic[E]):
    """An event and its time, in seconds of virtual time."""

    at: float
    event: E


Handler = Callable[[E, float], Iterable[TimedEvent[E]]]


class EventLoop(Generic[E]):
    """Virtual time, which only moves forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0  # handled so far
        self._queue: list[tuple[float, int, E]] = []
        self._num_queued = 0

    def run(self, first: Iterable[TimedEvent[E]], handle: Handler[E]) -> None:
        """Handles events until none is left. Raises ValueError if a handler returns an event of the past."""
        self._push(first)
        while self._queue:
            self.now, _, event = heapq.heappop(self._queue)
            self.num_events += 1
            self._push(handle(event, self.now))

    def _push(self, events: Iterable[TimedEvent[E]]) -> None:
        for at, event in events:
            if at < self.now:
                raise ValueError(f"{event} at {at} is before {self.now}")
            self._num_queued += 1
            heapq.heappush(self._queue, (at, self._num_queued, event))


# Events of a simulated cluster, and the scheduling of wake-ups.
#
# Each machine and the network have one valid wake-up, rescheduled when their state changes. An outdated one still
# fires, but finds nothing to do.


class Arrive(NamedTuple):
    """A request of the trace arrives and can be placed."""

    request: RequestState


class RetryPlacement(NamedTuple):
    """The gateway's pause before a placement is over. Ignored if the attempt is no longer current."""

    request: RequestState
    attempt: int


class LandingConfirmed(NamedTuple):
    """A prefill machine learns that its prompt has blocks on the decode machine."""

    request_id: str  # of one attempt


class HandoffDone(NamedTuple):
    """A decode machine has received and verified all KV of a prompt."""

    request_id: str


class WakeUp(NamedTuple):
    """An outcome of a machine is due, or of the network if `node` is None."""

    node: Node | None


class HeartbeatDue(NamedTuple):
    """A heartbeat may be due."""

    node: Node


class RoleCheckDue(NamedTuple):
    """The conductor checks if a machine should change its role, and draining machines check if they can change now."""


class FaultBegins(NamedTuple):
    fault: Fault


class FaultEnds(NamedTuple):
    fault: Fault


class SampleDue(NamedTuple):
    """A sample of instances and replicas is due."""


Event = (
    Arrive
    | RetryPlacement
    | LandingConfirmed
    | HandoffDone
    | WakeUp
    | HeartbeatDue
    | RoleCheckDue
    | FaultBegins
    | FaultEnds
    | SampleDue
)


_NETWORK = ""  # key next to the names of machines


class WakeUps:
    """The scheduled wake-ups of one cluster, and the machines touched since the last scheduling."""

    def __init__(self) -> None:
        self._woken_at: dict[str, float] = {}
        self._touched: dict[str, Node] = {}

    @property
    def touched(self) -> list[Node]:
        return list(self._touched.values())

    def touch(self, node: Node) -> None:
        """Marks a machine whose wake-up may have changed."""
        self._touched[node.name] = node

    def take_touched(self) -> list[Node]:
        """Returns and clears the touched machines, in the order of their first touch."""
        touched = self.touched
        self._touched.clear()
        return touched

    def woken(self, node: Node | None, now: float) -> None:
        """Records that a wake-up fired. Another one may be scheduled for the same instant."""
        name = _NETWORK if node is None else node.name
        if self._woken_at.get(name) == now:
            del self._woken_at[name]

    def next(self, node: Node | None, at: float | None, now: float) -> Iterator[TimedEvent[Event]]:
        """Yields the wake-up of a machine, or of the network if `node` is None, unless it is scheduled already."""
        name = _NETWORK if node is None else node.name
        if at is not None and self._woken_at.get(name) != at:
            self._woken_at[name] = at
            yield TimedEvent(max(at, now), WakeUp(node))
