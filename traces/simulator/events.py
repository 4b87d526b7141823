"""What happens to a simulated cluster, and when it looks after whom.

Of each machine and of the network one wake-up is under way, made anew when it changes. One that has been overtaken
still comes, finds nothing to do, and does no harm.
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
    """A request of the trace reaches the gateway."""

    journey: Journey


class PlaceAgain(NamedTuple):
    """A pause of the gateway is over; of an earlier attempt it means nothing."""

    journey: Journey
    attempt: int


class LandingKnown(NamedTuple):
    """A prefill machine hears that its prompt has blocks on the decode machine."""

    request_id: str  # of one attempt


class TakeOver(NamedTuple):
    """A decode machine has all KV of a prompt, and has verified it."""

    request_id: str


class Wake(NamedTuple):
    """Something of a machine is due; of the network where there is no machine."""

    node: Node | None


class Beat(NamedTuple):
    """A heartbeat may be due."""

    node: Node


class Consider(NamedTuple):
    """The conductor looks whether a machine should change its role, and machines
    that change whether they can."""


class FaultBegins(NamedTuple):
    fault: Fault


class FaultEnds(NamedTuple):
    fault: Fault


class Sample(NamedTuple):
    """Time to write down how things stand."""


Event = Arrive | PlaceAgain | LandingKnown | TakeOver | Wake | Beat | Consider | FaultBegins | FaultEnds | Sample


_NETWORK = ""  # beside the names of machines


class Wakes:
    """Of one cluster."""

    def __init__(self) -> None:
        self._woken_at: dict[str, float] = {}
        self._touched: dict[str, Node] = {}

    @property
    def touched(self) -> list[Node]:
        return list(self._touched.values())

    def touch(self, node: Node) -> None:
        """Something happened to a machine."""
        self._touched[node.name] = node

    def take_touched(self) -> list[Node]:
        """Each of them once, in the order in which it was first touched."""
        touched = self.touched
        self._touched.clear()
        return touched

    def woken(self, node: Node | None, now: float) -> None:
        """A wake-up came; it may have to come again at this very instant."""
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
