"""Replicas that the conductor has made and dropped: copies between stores in virtual time. Pure.

As live (`conductor.replication`, `kvstore.copying`): one copy into a store at a time and so many at once in all,
step by step; what is read is held at its source; blocks are there, and announced, when all bytes of their step are. A
step that is not done in full, since a machine died, blocks had left or no room was found, ends its copy as failed; what
earlier steps brought stays. Knows nothing of why a copy is made. Not modelled: pins, removals of whole prefixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conductor.events import CopyDue, CopySettled, DropDue
from conductor.replication.planner import COPY_S
from conductor.state import ConductorState
from kvstore.stored import StoredObject, Tier
from protocol.ids import InstanceId
from protocol.keys import BlockKey
from protocol.request import Endpoint
from traces.simulator.machines import PrefillNode
from traces.simulator.network import FlowId, Network
from traces.simulator.pool import Held
from traces.simulator.wakes import Wakes

COPIES_AT_ONCE = 4  # `conductor.replication.commands`


@dataclass(slots=True, eq=False)
class _Reading:
    """One step under way."""

    source: PrefillNode
    held: Held
    lacking: tuple[StoredObject, ...]  # of these, what the target had not when it began
    is_whole: bool  # the source has all that was to be read
    flows: set[FlowId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Copy:
    """One `CopyDue`."""

    due: CopyDue
    target: PrefillNode
    num_done: int = 0  # steps
    reading: _Reading | None = None  # None: it waits for its turn


class Replicas:
    """All copies that were asked for and have not ended."""

    def __init__(
        self,
        network: Network,
        stores: Mapping[str, PrefillNode],
        conductor: ConductorState,
        wakes: Wakes,
        block_bytes: int,
    ) -> None:
        """`stores`: the machines by the names of their store nodes."""
        self._network = network
        self._stores = stores
        self._conductor = conductor
        self._wakes = wakes
        self._block_bytes = block_bytes
        self._waiting: list[_Copy] = []
        self._running: dict[str, _Copy] = {}  # by the name of the target
        self._of_flow: dict[FlowId, _Copy] = {}
        self._num_copies = self._num_failed = self._num_made = 0
        self._num_dropped = self._num_last = self._num_drops_failed = 0
        self._bytes_copied = 0.0

    def begin(self, due: CopyDue | DropDue, now: float) -> None:
        """What the conductor decided."""
        if isinstance(due, DropDue):
            self._drop(due)
            return
        self._waiting.append(_Copy(due, self._stores[due.target.instance_id]))
        self._begin_waiting(now)

    def flow_ended(self, flow_id: FlowId, now: float) -> None:
        """A flow of the network ended; no-op when it was none of these."""
        copy = self._of_flow.pop(flow_id, None)
        if copy is None:
            return
        assert copy.reading is not None
        copy.reading.flows.discard(flow_id)
        if not copy.reading.flows:
            self._arrived(copy, copy.reading, now)
            self._begin_waiting(now)

    def died(self, node: PrefillNode, now: float) -> None:
        """Copies from and to this machine end. Those that wait fail when their turn comes."""
        for copy in list(self._running.values()):
            reading = copy.reading
            if reading is None or node not in (copy.target, reading.source):
                continue
            for flow in sorted(reading.flows):
                self._network.cancel(flow, now)
                del self._of_flow[flow]
            reading.source.store.let_go(reading.held)
            self._settle(copy, now, succeeded=False)
        self._begin_waiting(now)

    # -- copies

    def _begin_waiting(self, now: float) -> None:
        while (copy := self._next()) is not None:
            self._waiting.remove(copy)
            self._running[copy.target.name] = copy
            self._go_on(copy, now)

    def _next(self) -> _Copy | None:
        """The one that waits longest of those that may begin."""
        if len(self._running) >= COPIES_AT_ONCE:
            return None
        free = (copy for copy in self._waiting if copy.target.name not in self._running)
        return next(free, None)

    def _go_on(self, copy: _Copy, now: float) -> None:
        """To the next step that has something to carry, or to the end."""
        steps = copy.due.steps
        while copy.num_done < len(steps):
            step = steps[copy.num_done]
            source = self._stores[step.source.instance_id]
            if not (_is(source, step.source) and _is(copy.target, copy.due.target)):
                self._settle(copy, now, succeeded=False)
                return
            reading = self._read(source, copy.target, step.keys)
            if reading.lacking:
                self._carry(copy, reading, now)
                return
            source.store.let_go(reading.held)
            if not reading.is_whole:
                self._settle(copy, now, succeeded=False)
                return
            copy.num_done += 1
        self._settle(copy, now, succeeded=True)

    @staticmethod
    def _read(source: PrefillNode, target: PrefillNode, keys: tuple[BlockKey, ...]) -> _Reading:
        held = source.store.hold(keys)
        present = target.store.present(keys[: len(held)])
        pairs = zip(held.objects, present, strict=True)
        lacking = tuple(stored for stored, is_there in pairs if not is_there)
        return _Reading(source, held, lacking, is_whole=len(held) == len(keys))

    def _carry(self, copy: _Copy, reading: _Reading, now: float) -> None:
        """Between the machines' memories; what is only on the source's disk comes from there. Asking, a lease and a
        reservation take their time too."""
        copy.reading = reading
        source, target = reading.source.name, copy.target.name
        path = [f"{source}/out", f"{target}/in"]
        num_on_disk = sum(stored.tier is Tier.DISK for stored in reading.lacking)
        for links, num_blocks in (
            (path, len(reading.lacking) - num_on_disk),
            ([f"{source}/disk", *path], num_on_disk),
        ):
            if num_blocks:
                flow = self._network.start(
                    links, num_blocks * self._block_bytes, now, not_before=now + COPY_S
                )
                reading.flows.add(flow)
                self._of_flow[flow] = copy

    def _arrived(self, copy: _Copy, reading: _Reading, now: float) -> None:
        copy.reading = None
        num_taken = copy.target.store.take(reading.lacking)
        reading.source.store.let_go(reading.held)
        self._num_made += num_taken
        self._bytes_copied += len(reading.lacking) * self._block_bytes
        self._wakes.touch(copy.target)
        copy.num_done += 1
        if reading.is_whole and num_taken == len(reading.lacking):
            self._go_on(copy, now)
        else:
            self._settle(copy, now, succeeded=False)

    def _settle(self, copy: _Copy, now: float, *, succeeded: bool) -> None:
        del self._running[copy.target.name]
        copy.reading = None
        self._num_copies += succeeded
        self._num_failed += not succeeded
        due = copy.due
        target = InstanceId(due.target.instance_id)
        settled = CopySettled(
            copy_id=due.copy_id, target=target, keys=due.keys, succeeded=succeeded
        )
        self._conductor.handle(settled, now)

    # -- drops

    def _drop(self, due: DropDue) -> None:
        node = self._stores[due.store.instance_id]
        if not _is(node, due.store):
            self._num_drops_failed += 1
            return
        others = [each for each in self._stores.values() if each is not node and each.is_alive]
        elsewhere = {
            key
            for other in others
            for key, is_there in zip(due.keys, other.store.present(due.keys), strict=True)
            if is_there
        }
        removed = node.store.remove(due.keys)
        self._num_dropped += len(removed)
        # Of what the conductor believed elsewhere: it may have been evicted, or its machine died, a moment ago.
        self._num_last += len(set(removed) - elsewhere)
        self._wakes.touch(node)

    # -- what can be seen

    @property
    def counters(self) -> dict[str, float]:
        """For the result: copies are calls of the conductor, replicas are blocks."""
        return {
            "copies": self._num_copies,
            "copies_failed": self._num_failed,
            "replicas_made": self._num_made,
            "bytes_copied": self._bytes_copied,
            "replicas_dropped": self._num_dropped,
            "last_replicas_dropped": self._num_last,
            "drops_failed": self._num_drops_failed,
        }

    def held_at(self, node: PrefillNode) -> list[Held]:
        """What is being read from a machine; for its store's proof."""
        readings = (copy.reading for copy in self._running.values())
        return [each.held for each in readings if each is not None and each.source is node]

    def validate(self) -> None:
        """Raises AssertionError unless every copy that runs carries something, and none waits without reason."""
        flows: dict[FlowId, _Copy] = {}
        for name, copy in self._running.items():
            assert copy.target.name == name
            assert copy.reading is not None
            assert copy.reading.flows, "a copy carries nothing"
            assert copy.target.is_alive, "a copy goes on without its target"
            assert copy.reading.source.is_alive, "a copy goes on without its source"
            flows |= dict.fromkeys(copy.reading.flows, copy)
        assert flows == self._of_flow
        assert len(self._running) <= COPIES_AT_ONCE
        assert self._next() is None, "a copy waits for nothing"


def _is(node: PrefillNode, endpoint: Endpoint) -> bool:
    """Whether a machine is still the one that was meant: a later life is another one."""
    return node.is_alive and node.epoch == endpoint.epoch
