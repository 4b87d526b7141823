"""Pure nodes for tests: a state over a catalog over an index in memory, with a disk that only keeps count."""

from __future__ import annotations

from kvstore import eviction
from kvstore.catalog import Catalog
from kvstore.native.metadata import KeyIndex
from kvstore.state import StoreState
from kvstore.stored import Announcements, Tier, Watermarks
from protocol.keys import BlockKey
from tests.kvstore.hardware import Disk

NO_TRIM = Watermarks(evict_above=1.0)


class Heard:
    """Collects what a state announces."""

    def __init__(self) -> None:
        self.present: dict[BlockKey, BlockKey | None] = {}
        self.tiers: dict[BlockKey, Tier] = {}

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        assert key not in self.present
        self.present[key] = parent
        self.tiers[key] = tier

    def moved(self, key: BlockKey, tier: Tier) -> None:
        assert self.tiers[key] is not tier
        self.tiers[key] = tier

    def removed(self, key: BlockKey) -> None:
        del self.present[key]
        del self.tiers[key]


def make_state(
    nbytes: int,
    announce: Announcements,
    *,
    policy: str = "lru",
    watermarks: Watermarks = NO_TRIM,
    quotas: dict[str, int] | None = None,
    disk: Disk | None = None,
) -> StoreState:
    catalog = Catalog(
        nbytes,
        index=KeyIndex(),
        policies=lambda: eviction.make(policy),
        announce=announce,
        watermarks=watermarks,
        quotas=quotas,
        disk=disk,
    )
    return StoreState(catalog)
