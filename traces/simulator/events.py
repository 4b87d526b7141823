"""Events of a simulated cluster, and the scheduling of wake-ups.

Each machine and the network have one valid wake-up, rescheduled when their state changes. An outdated one still fires,
but finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from traces.simulator.clock import Timed
from traces.simulator.journey import Journey
from traces.simulator.machines import Node
from traces.simulator.network import Network
from traces.simulator.spec import Fault


class Arrive(NamedTuple):
    """A request of the trace arrives and can be placed."""

    journey: Journey


class PlaceAgain(NamedTuple):
    """The gateway's pause before a placement is over. Ignored if the attempt is no longer current."""

    journey: Journey
    attempt: int


class LandingKnown(NamedTuple):
    """A prefill machine learns that its prompt has blocks on the decode machine."""

    request_id: str  # of one attempt


class TakeOver(NamedTuple):
    """A decode machine has received and verified all KV of a prompt."""

    request_id: str


class Wake(NamedTuple):
    """An outcome of a machine is due, or of the network if `node` is None."""

    node: Node | None


class Beat(NamedTuple):
    """A heartbeat may be due."""

    node: Node


class Consider(NamedTuple):
    """The conductor checks if a machine should change its role, and draining machines check if they can change now."""


class FaultBegins(NamedTuple):
    fault: Fault


class FaultEnds(NamedTuple):
    fault: Fault


class Sample(NamedTuple):
    """A sample of instances and replicas is due."""


Event = Arrive | PlaceAgain | LandingKnown | TakeOver | Wake | Beat | Consider | FaultBegins | FaultEnds | Sample


_NETWORK = ""  # key next to the names of machines


class Wakes:
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

    def of_machine(self, node: Node, now: float) -> Iterator[Timed[Event]]:
        return self._next(node.name, node, node.machine.wake_at, now)

    def of_network(self, network: Network, now: float) -> Iterator[Timed[Event]]:
        return self._next(_NETWORK, None, network.wake_at, now)

    def _next(self, name: str, node: Node | None, at: float | None, now: float) -> Iterator[Timed[Event]]:
        if at is not None and self._woken_at.get(name) != at:
            self._woken_at[name] = at
            yield Timed(max(at, now), Wake(node))
