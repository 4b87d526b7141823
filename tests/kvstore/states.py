"""Pure nodes for tests: a state over a catalog over an index in memory, with a disk that only keeps count."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore import eviction
from kvstore.allocator import ALIGNMENT, padded
from kvstore.catalog import Catalog
from kvstore.disk.base import Place
from kvstore.native.metadata import KeyIndex
from kvstore.state import StoreState
from kvstore.stored import Announcements, Tier, Watermarks
from protocol.keys import BlockKey

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


@dataclass
class CountedDisk:
    """Space on a disk that never fails; remembers what lies where."""

    live_limit: int
    places: dict[Place, BlockKey] = field(default_factory=dict)
    num_given: int = 0

    def space(self, length: int) -> int:
        return padded(length) + ALIGNMENT

    def takes(self, length: int) -> bool:
        return self.space(length) <= self.live_limit

    def put(self, key: BlockKey) -> Place:
        self.num_given += 1
        place = Place(self.num_given)
        self.places[place] = key
        return place

    def release(self, place: Place) -> None:
        del self.places[place]


def make_state(
    nbytes: int,
    announce: Announcements,
    *,
    policy: str = "lru",
    watermarks: Watermarks = NO_TRIM,
    quotas: dict[str, int] | None = None,
    disk: CountedDisk | None = None,
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
