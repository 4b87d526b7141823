"""When machines and the network are to be looked after next: one wake-up under way for each, made anew when it changes.

Owns which machines something happened to during the event under handling. Its rule: a wake-up that has been overtaken
still comes, finds nothing to do, and does no harm. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from traces.simulator.clock import Timed
from traces.simulator.events import Event, Wake
from traces.simulator.machines import DecodeNode, Node, PrefillNode
from traces.simulator.network import Network

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
        assert isinstance(node, PrefillNode | DecodeNode)
        return self._next(node.name, node, node.machine.wake_at, now)

    def of_network(self, network: Network, now: float) -> Iterator[Timed[Event]]:
        return self._next(_NETWORK, None, network.wake_at, now)

    def _next(
        self, name: str, node: Node | None, at: float | None, now: float
    ) -> Iterator[Timed[Event]]:
        if at is not None and self._woken_at.get(name) != at:
            self._woken_at[name] = at
            yield Timed(max(at, now), Wake(node))


def computes(node: Node) -> bool:
    """Whether a machine's devices are busy."""
    assert isinstance(node, PrefillNode | DecodeNode)
    return node.machine.is_computing
