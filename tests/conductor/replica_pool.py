"""A pool under a conductor that decides on replicas: what its stores hold is kept here, and told as they would."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.events import (
    BlockChanges,
    CopyDue,
    CopySettled,
    DropDue,
    Heartbeat,
    Load,
    Phase,
    Tick,
)
from conductor.limits import Limits
from conductor.policies import make_policy
from conductor.replication.planner import ReplicationTerms
from conductor.state import ConductorState
from protocol.ids import InstanceId
from protocol.keys import NO_PARENT, BlockKey
from tests.conductor.cluster import LAYOUT, Cluster

CAPACITY = 1000 * LAYOUT.block_bytes
TERMS = ReplicationTerms(least_hits=4, window_s=30.0, cool_s=60.0)
LIMITS = Limits(ttft_slo_s=1000.0, tbt_slo_s=1000.0, lease_s=10_000.0)
STORES = ("s0", "s1", "s2")


class Pool:
    """A conductor over three hosts, each with a prefill instance and its home store; what stores hold is kept here."""

    def __init__(
        self, terms: ReplicationTerms | None = TERMS, policy: str = "global-cache-aware"
    ) -> None:
        self.cluster = Cluster(policy=policy, limits=LIMITS)
        self.cluster.state = ConductorState(make_policy(policy, 2.0), LIMITS, replication=terms)
        self.held: dict[str, dict[BlockKey, BlockKey]] = {}
        self._next_seq: dict[str, int] = {}
        self.num_placed = 0
        for number, store in enumerate(STORES):
            host = f"host-{number}"
            self.cluster.store(store, host=host)
            self.cluster.prefill(f"p{number}", host=host, home=store)
            self.held[store], self._next_seq[store] = {}, 1
            self.tell(store)
        self.cluster.decode("d0", num_blocks=10**6)

    def tell(
        self, store: str, added: Sequence[tuple[BlockKey, BlockKey]] = (), gone: Sequence[BlockKey] = ()
    ) -> None:  # fmt: skip
        first = self._next_seq[store]
        self._next_seq[store] = first + len(added) + len(gone)
        changes = BlockChanges(
            first_seq=first, next_seq=self._next_seq[store], added=tuple(added), removed=tuple(gone)
        )
        self.cluster.send(
            Heartbeat(
                instance_id=InstanceId(store),
                epoch=1,
                load=Load(capacity_bytes=CAPACITY, free_bytes=CAPACITY),
                changes=changes,
            )
        )

    def put(self, store: str, keys: Sequence[BlockKey]) -> None:
        """A whole chain, or its leading part."""
        new = [
            (key, keys[number - 1] if number else NO_PARENT)
            for number, key in enumerate(keys)
            if key not in self.held[store]
        ]
        self.held[store].update(new)
        self.tell(store, added=new)

    def lose(self, store: str, keys: Sequence[BlockKey]) -> None:
        gone = [key for key in keys if self.held[store].pop(key, None) is not None]
        self.tell(store, gone=gone)

    def ask_for(self, keys: Sequence[BlockKey], times: int = 1) -> None:
        for _ in range(times):
            self.num_placed += 1
            self.cluster.now += 0.1
            self.cluster.place(f"r{self.num_placed}", keys=keys, tokens=len(keys) * 10 + 5)

    def finish_all(self) -> None:
        for number in range(1, self.num_placed + 1):
            self.cluster.report(f"r{number}", Phase.CANCELLED)

    def look(self, later_s: float = 1.0) -> list[CopyDue | DropDue]:
        self.cluster.now += later_s
        actions = self.cluster.send(Tick())
        return [action for action in actions if isinstance(action, CopyDue | DropDue)]

    def carry_out(self, due: CopyDue | DropDue) -> None:
        """As store nodes would."""
        if isinstance(due, DropDue):
            self.lose(due.store.instance_id, due.keys)
            return
        source = {key: step.source.instance_id for step in due.steps for key in step.keys}
        parents = {key: self.held[source[key]][key] for key in due.keys}
        self.held[due.target.instance_id].update(parents)
        self.tell(due.target.instance_id, added=tuple(parents.items()))
        self.settle(due, succeeded=True)

    def settle(self, due: CopyDue, *, succeeded: bool) -> None:
        target = InstanceId(due.target.instance_id)
        self.cluster.send(
            CopySettled(copy_id=due.copy_id, target=target, keys=due.keys, succeeded=succeeded)
        )
