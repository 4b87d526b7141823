"""Pure nodes for tests: a state over a catalog over an index in memory, with a disk that only keeps count."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore import eviction
from kvstore.catalog import Catalog
from kvstore.native.metadata import KeyIndex
from kvstore.state import StoreState
from kvstore.stored import Announcements, Watermarks
from tests.kvstore.eviction_law import Law
from tests.kvstore.hardware import Disk

NO_TRIM = Watermarks(evict_above=1.0)


@dataclass
class Heard(Law):
    """Collects what a state announces, whoever wished for it."""

    no_eviction: bool = True


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
