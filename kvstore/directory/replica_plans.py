"""Data types of the planner's inputs and plans. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A store node as the directory last heard of it."""

    instance_id: InstanceId
    host: str
    free_bytes: int
    capacity_bytes: int
    draining: bool = False
    in_step: bool = True  # its blocks are completely known

    @property
    def used_share(self) -> float:
        return 1.0 - self.free_bytes / self.capacity_bytes if self.capacity_bytes else 1.0

    @property
    def takes_replicas(self) -> bool:
        return self.in_step and not self.draining


NodeViews: TypeAlias = Mapping[InstanceId, NodeView]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """Blocks of one chain, in order, to be copied from one node."""

    keys: tuple[BlockKey, ...]
    source: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCopy:
    """Blocks of a chain to be copied to one node. Steps run in order, so that parents come before children."""

    steps: tuple[CopyStep, ...]
    target: InstanceId

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(key for step in self.steps for key in step.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDrop:
    """Replicas to be removed from one node, children before parents."""

    keys: tuple[BlockKey, ...]
    node: InstanceId
    keep_pinned: bool = False  # keep replicas that were pinned since the node was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedReplicas:
    """The pinned replicas of each node. `unknown` are nodes that did not answer."""

    pinned: Mapping[InstanceId, frozenset[BlockKey]] = field(default_factory=dict)
    unknown: frozenset[InstanceId] = frozenset()

    def may_drop(self, key: BlockKey, node: InstanceId, holders: Iterable[InstanceId], *, unpinned: bool) -> bool:
        """Returns True if a replica may be dropped: an unpinned one, or, unless `unpinned`, one of a block whose
        replicas are all pinned."""
        if node in self.unknown:
            return False
        if not self._is_pinned(key, node):
            return True
        return not unpinned and all(other not in self.unknown and self._is_pinned(key, other) for other in holders)

    def _is_pinned(self, key: BlockKey, node: InstanceId) -> bool:
        return key in self.pinned.get(node, frozenset())


NO_PINS = PinnedReplicas()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    copies: tuple[ReplicaCopy, ...] = ()
    drops: tuple[ReplicaDrop, ...] = ()
    missing: int = 0  # requested blocks without a holder
