"""What a simulated node does about removals that reach all nodes, some, or one: as `kvstore.remembering` and
`kvstore.catching_up`, over calls that are late or lost. Knows the truth too: which values may still be there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.absence import Answer, covered_s, may_stay
from kvstore.disk.base import DiskObject
from kvstore.removals import Heard, Removals
from protocol.keys import BlockKey

if TYPE_CHECKING:
    from tests.kvstore.simulated_node import SimulatedNode

PULL_EVERY_S, RETRY_S = 0.5, 0.1
LOSS = 0.1


class SimulatedRemovals:
    """Of one node, over its lives. What it has learned is in its folder, and goes with the disk."""

    def __init__(self, node: SimulatedNode, others: Callable[[], Sequence[SimulatedNode]]) -> None:
        self._node = node
        self._others = others
        self._kept: dict[tuple[BlockKey, int], float] = {}  # instants of the world
        self._in_touch_at = 0.0
        self._covered_s = 0.0
        self.settled = False
        self.log = Removals(0, 0.0)

    def start(self, recover: Callable[[bool], None]) -> None:
        """A new life: `recover` is told whether what is on disk may be used, once the others have been asked."""
        now = self._node.now
        self.settled = False
        self.log = Removals(self._node.life, now)
        world_now = self._node.world_now
        self.log.learn([Heard(*each, world_now - at) for each, at in self._kept.items()], now)
        self._node.later(self._latency(), lambda: self._fence(recover))

    def crash(self) -> None:
        self._covered_s = self.log.covered_s(self._node.now)
        self._in_touch_at = self._node.world_now

    def lose_folder(self) -> None:
        self._kept.clear()

    def execute(self, keys: Sequence[BlockKey], removal_id: int) -> list[BlockKey]:
        fresh = self.log.execute(keys, removal_id, self._node.now)
        self._keep()
        return fresh

    def _keep(self) -> None:
        gone_s = self._node.world_now - self._node.now
        self._kept |= {(r.key, r.removal_id): r.at + gone_s for r in self.log.all()}

    def _fence(self, recover: Callable[[bool], None]) -> None:
        absent_s = self._node.world_now - self._in_touch_at if self._node.life > 1 else 0.0
        answers = [self._ask(other) for other in self._others() if other.is_up]
        verdict = may_stay(absent_s, answers)
        if verdict is None:
            self._node.later(RETRY_S, lambda: self._fence(recover))
            return
        self.log.inherit(covered_s(answers), self._node.now)
        if verdict:
            self.log.inherit(self._covered_s + absent_s, self._node.now)
        self.settled = True
        recover(verdict)
        self._node.later(PULL_EVERY_S, self._pull)

    def _pull(self) -> None:
        self._ask(self._node.rng.choice(self._others()))
        self._node.later(PULL_EVERY_S, self._pull)

    def _ask(self, other: SimulatedNode) -> Answer | None:
        """The answer is on its way for a while, by which it gets older than it says."""
        if not other.is_up or other.is_stalled or self._node.rng.random() < LOSS:
            return None
        told = other.removals.log.tell(1, 10_000, other.now).heard
        self.learn(told)
        return Answer(other.removals.settled, other.removals.log.covered_s(other.now))

    def learn(self, told: Sequence[Heard]) -> None:
        fresh = self.log.learn(told, self._node.now)
        self._keep()
        bounds: dict[BlockKey, int] = {}
        for removal in fresh:
            bound = self._node.state.reserved_before(removal.at)
            bounds[removal.key] = max(bound, bounds.get(removal.key, 0))
        self._node.drop_before(bounds)

    def last(self, keys: Sequence[BlockKey]) -> list[Heard | None]:
        now, log = self._node.now, self.log
        return [Heard(k, log.last(k), log.age_s(k, now)) if log.last(k) else None for k in keys]

    def _latency(self) -> float:
        return self._node.rng.uniform(0, 0.2)


class Truth:
    """Which values were stored before which removals; instants of the world."""

    def __init__(self) -> None:
        self.stored_at: dict[int, float] = {}  # by content
        self.begun_at: dict[tuple[BlockKey, int], float] = {}  # removals

    def stored(self, content: int, now: float) -> None:
        self.stored_at.setdefault(content, now)

    def check(self, nodes: Sequence[SimulatedNode]) -> int:
        """Raises AssertionError when a value is somewhere that was there before a removal of which somebody knows;
        gives how many removals were looked at."""
        known = {
            (removal.key, removal.removal_id)
            for node in nodes
            for removal in node.removals.log.all()
        }
        for node in nodes:
            for stored in node.inventory():
                for key, removal_id in known:
                    if key == stored.key:
                        earlier = self.stored_at[stored.checksum] < self.begun_at[key, removal_id]
                        assert not earlier, f"{node.name} has a value that was removed everywhere"
        return len(known)


def forgotten(bounds: dict[BlockKey, int]) -> list[DiskObject]:
    """For a disk: up to below these."""
    return [
        DiskObject(key=key, parent=None, length=0, checksum=0, generation=bound - 1)
        for key, bound in bounds.items()
    ]
