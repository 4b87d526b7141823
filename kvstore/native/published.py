"""An index that other processes read: what its owner promises beside what every index does."""

from __future__ import annotations

from typing import Protocol

from kvstore.native.base import KeyIndex
from kvstore.native.layout import Geometry


class PublishedIndex(KeyIndex, Protocol):
    """A `KeyIndex`, and where readers find it (`kvstore.native.reader`)."""

    @property
    def memory(self) -> memoryview:
        """Another one after the index has grown; the one before was marked and retired then."""

    @property
    def geometry(self) -> Geometry: ...
