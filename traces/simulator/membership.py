"""How the machines keep the conductor informed: registration, heartbeats, snapshots when it asks. As live.

A heartbeat goes out each interval, and soon after blocks have changed. A machine that the conductor does not know, or
not any more, registers and says everything that it has. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from conductor.events import Event, HeartbeatSeen, Refused
from conductor.state import ConductorState
from traces.simulator.machines import (
    DecodeNode,
    Node,
    PrefillNode,
    decode_heartbeat,
    decode_registration,
    prefill_heartbeats,
    prefill_registrations,
)
from traces.simulator.spec import ClusterSpec

GATHER_S = 0.02  # `protocol.membership.GATHER_S`: several changes, one message


class Membership:
    """Speaks for all machines."""

    def __init__(self, spec: ClusterSpec, conductor: ConductorState) -> None:
        self._spec = spec
        self._conductor = conductor
        self.num_heartbeats = 0

    def register(self, node: Node, now: float) -> None:
        """The machine is new, or the conductor has lost it."""
        if isinstance(node, PrefillNode):
            self._tell(prefill_registrations(node, self._spec), now)
            snapshot = node.store.snapshot()
            self._tell(prefill_heartbeats(node, self._spec, snapshot), now)
        elif isinstance(node, DecodeNode):
            self._tell([decode_registration(node, self._spec)], now)
        node.beat_at = now + self._spec.heartbeat_interval_s

    def beat(self, node: Node, now: float) -> None:
        """Sends the heartbeats that are due, and what the conductor asks for in reply."""
        node.beat_at = now + self._spec.heartbeat_interval_s
        if node.is_silent:
            return
        self.num_heartbeats += 1
        if isinstance(node, PrefillNode):
            changes = node.store.take_changes()
            seen = self._tell(prefill_heartbeats(node, self._spec, changes), now)
        else:
            assert isinstance(node, DecodeNode)
            seen = self._tell([decode_heartbeat(node, now)], now)
        if not all(each.known for each in seen):
            self.register(node, now)
        elif any(each.resync for each in seen) and isinstance(node, PrefillNode):
            self._tell(prefill_heartbeats(node, self._spec, node.store.snapshot()), now)

    def changed(self, node: PrefillNode, now: float) -> bool:
        """Blocks may have changed; whether that brings the next heartbeat forward."""
        due_at = now + GATHER_S
        if not node.store.has_news or node.beat_at <= due_at:
            return False
        node.beat_at = due_at
        return True

    def _tell(self, events: Iterable[Event], now: float) -> list[HeartbeatSeen]:
        seen: list[HeartbeatSeen] = []
        for event in events:
            reply = self._conductor.handle(event, now)[-1]
            if isinstance(reply, Refused):
                raise reply.error
            if isinstance(reply, HeartbeatSeen):
                seen.append(reply)
        return seen
