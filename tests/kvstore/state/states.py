"""Builds pure nodes for tests: a state over a catalog over an index in memory. Each announcement is checked against the
rules for what may happen to a visible object without a client's request."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moonserve.kvstore.disk.base import Pin
from moonserve.kvstore.published_index import KeyIndex
from moonserve.kvstore.state import eviction
from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.objects import ObjectListener, Tier, Watermarks
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import BlockKey

NO_TRIM = Watermarks(evict_above=1.0)


@dataclass
class Law:
    """Tracks the objects that the node announces as visible, and asserts that none is evicted or demoted wrongly."""

    tiers: dict[BlockKey, Tier] = field(default_factory=dict)
    parents: dict[BlockKey, BlockKey | None] = field(default_factory=dict)
    pins: dict[BlockKey, Pin] = field(default_factory=dict)
    leased: set[BlockKey] = field(default_factory=set)
    is_leaving: Callable[[BlockKey], bool] = lambda block: False  # being written to leave memory
    no_eviction: bool = False  # the change is a client's removal or a loss of the disk: the rules do not apply

    def added(self, block: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        assert block not in self.tiers
        self.tiers[block], self.parents[block] = tier, parent

    def moved(self, block: BlockKey, tier: Tier) -> None:
        assert self.tiers[block] is not tier
        self.tiers[block] = tier
        if tier is Tier.DISK and not self.no_eviction:
            assert block not in self.leased, "left memory under a lease"
            in_memory = {b for b in self._followers(block) if self.tiers[b] is Tier.MEMORY}
            assert all(map(self.is_leaving, in_memory)), "left memory before its follower"

    def removed(self, block: BlockKey) -> None:
        del self.tiers[block]
        if not self.no_eviction:
            assert not self._followers(block), "evicted before its follower"
            assert block not in self.leased, "evicted under a lease"
            assert self.pins.get(block) is not Pin.HARD, "evicted though pinned"
        del self.parents[block]
        self.pins.pop(block, None)

    def _followers(self, block: BlockKey) -> set[BlockKey]:
        return {b for b in self.tiers if self.parents[b] == block}


@dataclass
class Heard(Law):
    """Collects a state's announcements without checking them against the eviction rules."""

    no_eviction: bool = True


def make_state(nbytes: int, announce: ObjectListener, *, policy: str = "lru", **more: Any) -> StoreState:
    """Builds a node's state. `more` is passed on to `Catalog`; unless it says otherwise, nothing is trimmed."""
    usual = {"index": KeyIndex(), "watermarks": NO_TRIM, "policies": lambda: eviction.make(policy)}
    return StoreState(Catalog(nbytes, announce=announce, **usual | more))
