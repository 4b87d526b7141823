"""Plans which replicas to make and which to remove. Pure: `now` is an argument.

Rules: a hot block gains one replica at a time, on the least used node of another host if there is one, and then rests.
Its whole chain is copied with it, parents first, since a block is useless without its ancestors. Heat never makes more
than `extra_replicas` of a block. Only replicas made for heat are dropped for being cold: children first, never the last
replica, never a block that another block on the node follows. A pinned replica is not dropped while an unpinned one is
left. Knows the nodes by their `NodeView`s; `copy_ended` reports the results of a plan.
"""

from collections.abc import Collection, Iterable, Sequence

from moonserve.kvstore.directory.heat import Heat
from moonserve.kvstore.directory.holders import BlockChains, Directory
from moonserve.kvstore.directory.replica_plans import (
    NO_PINS,
    CopyStep,
    NodeView,
    NodeViews,
    PinnedReplicas,
    ReplicaCopy,
    ReplicaDrop,
    ReplicaPlan,
)
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import InstanceId

KEYS_PER_STEP = 64
"""Blocks per call to a node: few enough to repeat on another node, enough to fill the transfer engine."""
CHAINS_PER_PLAN = 32
"""Limit of hot chains copied per plan; the others are still hot in the next plan, a second later."""
COPY_EXPECTED_S = 120.0
"""Time after which an unsettled copy is no longer expected."""
ANNOUNCEMENT_EXPECTED_S = 5.0
"""How long a copy that succeeded is expected. Its node announces it within milliseconds, or in its next inventory."""
SHUN_S = 10.0
"""How long a node that failed to take a copy gets none."""


class ReplicaPlanner:
    """Plans the replicas of one directory's blocks by their `heat`."""

    def __init__(self, directory: Directory, heat: Heat, *, extra_replicas: int = 2, cool_s: float = 60.0) -> None:
        """The defaults are Mooncake's, as are 8 hits in 10 s (`Heat`). `cool_s`: seconds of rest."""
        self._directory = directory
        self._chains = BlockChains(directory)
        self._heat = heat
        self._max_replicas = 1 + extra_replicas
        self._cool_s = cool_s
        self._ledger = _PlannerMemory()

    def holders(self, keys: Iterable[BlockKey]) -> dict[InstanceId, list[BlockKey]]:
        """Returns, by node, which of these keys it holds. Ask these nodes for pins before `plan` or `plan_change`."""
        held: dict[InstanceId, list[BlockKey]] = {}
        for key in keys:
            for node in self._directory.holders(key):
                held.setdefault(node, []).append(key)
        return held

    def cold_blocks(self, now: float) -> list[BlockKey]:
        """Returns the blocks that `plan` may drop for being cold."""
        cold = [key for key, _, since in self._ledger.made() if self._is_cold(key, since, now)]
        return list(dict.fromkeys(cold))

    def plan(self, nodes: NodeViews, now: float, pins: PinnedReplicas = NO_PINS) -> ReplicaPlan:
        """Returns the copies of hot blocks and the drops of cold replicas that are due."""
        self._ledger.expire(now)
        drops = self._drop_cold(nodes, now, pins)
        copies: list[ReplicaCopy] = []
        for chain in self._hot_chains(now):
            copies += self._replicate_hot(chain, nodes, now)
        return ReplicaPlan(copies=tuple(copies), drops=drops)

    def plan_change(
        self,
        keys: Sequence[BlockKey],
        num_replicas: int,
        nodes: NodeViews,
        now: float,
        pins: PinnedReplicas = NO_PINS,
    ) -> ReplicaPlan:
        """Returns a plan that gives each of `keys` and its ancestors at least `num_replicas` (1 or more), as far as
        there are nodes, and drops replicas of `keys` above that number, from the fullest nodes first."""
        held = [key for key in keys if self._directory.holders(key)]
        copies: list[ReplicaCopy] = []
        for leaf in self._leaves(held):
            copies += self._add_replicas(self._chains.chain_to(leaf), num_replicas, nodes, now)
        fullest = sorted(nodes.values(), key=lambda n: (-n.used_share, n.instance_id))
        drops = self._drop({node.instance_id: held for node in fullest}, num_replicas, nodes, pins)
        return ReplicaPlan(copies=tuple(copies), drops=drops, missing=len(keys) - len(held))

    def copy_ended(self, copy: ReplicaCopy, *, succeeded: bool, now: float) -> None:
        """Reports the result of a copy. A failed one is planned again on another node."""
        if succeeded:
            self._ledger.expect(copy.keys, copy.target, now + ANNOUNCEMENT_EXPECTED_S)
            return
        self._ledger.failed(copy.keys, copy.target, now)
        for key in copy.keys:
            self._forget(key, copy.target)

    def announced(self, keys: Iterable[BlockKey], node: InstanceId) -> None:
        """Reports that these blocks of a copy are in the index, so that they are not expected any more."""
        self._ledger.announced(keys, node)

    # Copies

    def _hot_chains(self, now: float) -> list[list[BlockKey]]:
        wanting = [
            key
            for key in self._heat.hot(now)
            if not self._ledger.is_resting(key, now) and 0 < len(self._replicas(key, now)) < self._max_replicas
        ]
        leaves = self._leaves(wanting)[:CHAINS_PER_PLAN]
        return [chain for leaf in leaves if (chain := self._chains.chain_to(leaf))]

    def _leaves(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Returns those of `keys` that are not the parent of another."""
        inner = {self._chains.parent(key) for key in keys}
        return [key for key in dict.fromkeys(keys) if key not in inner]

    def _replicate_hot(self, chain: Sequence[BlockKey], nodes: NodeViews, now: float) -> list[ReplicaCopy]:
        """Plans one more replica of the chain's last block, with the ancestors that the target lacks."""
        replicas = [self._replicas(key, now) for key in chain]
        fitting = (
            node
            for node in self._by_use(nodes, replicas[-1], now)
            if node.instance_id not in replicas[-1]
            and all(node.instance_id in those or len(those) < self._max_replicas for those in replicas)
        )
        target = next(fitting, None)
        if target is None:
            return []
        copies = self._copy(_without(chain, replicas, target), target, nodes, now)
        for copy in copies:
            self._ledger.rest(copy.keys, now + self._cool_s)
            self._ledger.note_made(copy.keys, copy.target, now)
            for key in copy.keys:
                self._heat.watch(key, now)
        return copies

    def _add_replicas(
        self, chain: Sequence[BlockKey], num_replicas: int, nodes: NodeViews, now: float
    ) -> list[ReplicaCopy]:
        copies: list[ReplicaCopy] = []
        for _ in nodes:
            replicas = [self._replicas(key, now) for key in chain]
            short = [those for those in replicas if len(those) < num_replicas]
            if not short:
                break
            enough = [those for those in replicas if len(those) >= num_replicas]
            # The target must lack a block with too few replicas, and as few as possible of the other blocks.
            useful = [n for n in self._by_use(nodes, short[-1], now) if _lacking(n, short)]
            if not useful:
                break
            target = min(useful, key=lambda node, enough=enough: _lacking(node, enough))  # type: ignore[misc]
            copies += self._copy(_without(chain, replicas, target), target, nodes, now)
        return copies

    def _by_use(self, nodes: NodeViews, holders: Collection[InstanceId], now: float) -> list[NodeView]:
        """Returns the nodes that take replicas: nodes on other hosts than the holders' first, then the least used."""
        hosts = {nodes[holder].host for holder in holders if holder in nodes}
        shunned = self._ledger.is_shunned
        taking = [n for n in nodes.values() if n.takes_replicas and not shunned(n.instance_id, now)]
        return sorted(taking, key=lambda n: (n.host in hosts, n.used_share, n.instance_id))

    def _copy(self, keys: Sequence[BlockKey], target: NodeView, nodes: NodeViews, now: float) -> list[ReplicaCopy]:
        """Plans a copy of the leading run of `keys` that nodes in step have, and expects it from now on.

        Returns at most one copy.
        """
        steps: list[CopyStep] = []
        done = 0
        while done < len(keys):
            step = self._step(keys[done : done + KEYS_PER_STEP], target, nodes)
            if step is None:
                break
            steps.append(step)
            done += len(step.keys)
        if not steps:
            return []
        copy = ReplicaCopy(steps=tuple(steps), target=target.instance_id)
        self._ledger.expect(copy.keys, copy.target, now + COPY_EXPECTED_S)
        return [copy]

    def _step(self, keys: Sequence[BlockKey], target: NodeView, nodes: NodeViews) -> CopyStep | None:
        """Returns the step from the node that has the longest run of leading `keys`."""
        runs = {
            node: run
            for node, run in self._directory.match(b"".join(keys)).items()
            if node in nodes and nodes[node].in_step and node != target.instance_id
        }
        if not runs:
            return None
        near = {node for node in runs if nodes[node].host == target.host}
        source = max(runs, key=lambda node: (runs[node], node in near, node))
        return CopyStep(keys=tuple(keys[: runs[source]]), source=source)

    def _replicas(self, key: BlockKey, now: float) -> set[InstanceId]:
        """Returns the nodes that hold a block, or are expected to."""
        return {*self._directory.holders(key), *self._ledger.expected(key, now)}

    # Drops

    def _drop_cold(self, nodes: NodeViews, now: float, pins: PinnedReplicas) -> tuple[ReplicaDrop, ...]:
        surplus: dict[InstanceId, list[BlockKey]] = {}
        for key, node, since in self._ledger.made():
            if self._is_cold(key, since, now):
                surplus.setdefault(node, []).append(key)
        drops = self._drop(surplus, 1, nodes, pins)
        for node, keys in surplus.items():
            gone = {key for drop in drops if drop.node == node for key in drop.keys}
            for key in keys:
                if key in gone or node not in self._directory.holders(key):
                    self._forget(key, node)
        return drops

    def _is_cold(self, key: BlockKey, since: float, now: float) -> bool:
        return now - max(since, self._heat.last_hit_at(key)) >= self._cool_s

    def _forget(self, key: BlockKey, node: InstanceId) -> None:
        if self._ledger.forget_made(key, node):
            self._heat.unwatch(key)

    def _drop(
        self, surplus: dict[InstanceId, list[BlockKey]], kept: int, nodes: NodeViews, pins: PinnedReplicas
    ) -> tuple[ReplicaDrop, ...]:
        """Plans drops among these replicas, in this order, that leave each block at least `kept` replicas on nodes in
        step that are not draining: unpinned replicas first, then pinned ones of blocks without an unpinned one."""
        staying = {node for node, view in nodes.items() if view.takes_replicas}
        holders: dict[BlockKey, set[InstanceId]] = {
            key: set(self._directory.holders(key)) for keys in surplus.values() for key in keys
        }

        def is_spare(key: BlockKey, node: InstanceId, *, unpinned: bool) -> bool:
            return (
                node in holders[key]
                and len((holders[key] & staying) - {node}) >= kept
                and pins.may_drop(key, node, holders[key], unpinned=unpinned)
            )

        drops = []
        for unpinned in (True, False):
            for node, keys in surplus.items():
                spare = [key for key in keys if is_spare(key, node, unpinned=unpinned)]
                if node in nodes and (free := self._chains.droppable(spare, node, holders)):
                    drops.append(ReplicaDrop(keys=tuple(free), node=node, keep_pinned=unpinned))
                    for key in free:
                        holders[key].discard(node)
        return tuple(drops)


def _lacking(node: NodeView, replicas: Sequence[Collection[InstanceId]]) -> int:
    return sum(node.instance_id not in those for those in replicas)


def _without(chain: Sequence[BlockKey], replicas: Sequence[Collection[InstanceId]], target: NodeView) -> list[BlockKey]:
    """Returns the blocks of a chain that the target lacks."""
    return [key for key, those in zip(chain, replicas, strict=True) if target.instance_id not in those]


class _PlannerMemory:
    """The planner's memory: expected copies, resting blocks, shunned nodes, replicas made for heat.

    It may be lost with the process: replicas made for heat are then like others, and eviction removes them when they
    are cold. Instants are monotonic; `expire` drops entries that are over.
    """

    def __init__(self) -> None:
        self._expected: dict[BlockKey, dict[InstanceId, float]] = {}  # until when
        self._resting: dict[BlockKey, float] = {}  # until when
        self._shunned: dict[InstanceId, float] = {}  # until when
        self._made: dict[BlockKey, dict[InstanceId, float]] = {}  # since when

    def expect(self, keys: Iterable[BlockKey], node: InstanceId, until: float) -> None:
        for key in keys:
            self._expected.setdefault(key, {})[node] = until

    def announced(self, keys: Iterable[BlockKey], node: InstanceId) -> None:
        """Drops the expectation of these blocks, which the index knows now."""
        for key in keys:
            self._expected.get(key, {}).pop(node, None)

    def failed(self, keys: Iterable[BlockKey], node: InstanceId, now: float) -> None:
        """Allows these blocks to be copied again at once, but not to this node."""
        for key in keys:
            self._expected.get(key, {}).pop(node, None)
            self._resting.pop(key, None)
        self._shunned[node] = now + SHUN_S

    def expected(self, key: BlockKey, now: float) -> set[InstanceId]:
        """Returns the nodes that are expected to hold a block soon."""
        return {node for node, until in self._expected.get(key, {}).items() if until > now}

    def rest(self, keys: Iterable[BlockKey], until: float) -> None:
        for key in keys:
            self._resting[key] = until

    def is_resting(self, key: BlockKey, now: float) -> bool:
        return self._resting.get(key, now) > now

    def is_shunned(self, node: InstanceId, now: float) -> bool:
        return self._shunned.get(node, now) > now

    def note_made(self, keys: Iterable[BlockKey], node: InstanceId, now: float) -> None:
        for key in keys:
            self._made.setdefault(key, {})[node] = now

    def made(self) -> list[tuple[BlockKey, InstanceId, float]]:
        """Returns (block, node, since) for all replicas made for heat."""
        return [(key, node, at) for key, nodes in self._made.items() for node, at in nodes.items()]

    def forget_made(self, key: BlockKey, node: InstanceId) -> bool:
        """Forgets a replica made for heat, if it is one. Returns True if the block has no other."""
        nodes = self._made.get(key, {})
        nodes.pop(node, None)
        if not nodes:
            self._made.pop(key, None)
        return not nodes

    def expire(self, now: float) -> None:
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        self._shunned = {node: until for node, until in self._shunned.items() if until > now}
        for key in list(self._expected):
            nodes = {node: until for node, until in self._expected[key].items() if until > now}
            if nodes:
                self._expected[key] = nodes
            else:
                del self._expected[key]
