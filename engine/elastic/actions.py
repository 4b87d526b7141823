"""What the state of an elastic pool is told at its beginning, and what comes out of it. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.elastic.pages import Frame
from protocol.ids import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """How many empty pages an active model keeps mapped: fewer than `low` are filled up, more than `high` are given
    back. The numbers are kvcached's."""

    low: int = 5
    high: int = 10
    idle_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.idle_s < 0:
            raise ValueError(f"a reserve between 0 ≤ low ≤ high and idle_s ≥ 0, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """Put these frames behind the page."""

    model: str
    page: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmap:
    """Take these frames from the page."""

    model: str
    page: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """These frames are no part of the budget any more and lie in no page: the machine may have them."""

    frames: tuple[Frame, ...]


Action = Map | Unmap | Release


@dataclass(slots=True, kw_only=True, eq=False)
class Grant:
    """What one call was given. The blocks may be written once `outstanding` is empty."""

    blocks: list[BlockId]
    outstanding: set[int]  # pages that are not mapped yet
    actions: list[Action]  # to be run by who asked
    pinned: Sequence[int] = ()  # pages that this call pinned
    failed: bool = False  # a page could not be mapped: the blocks are nobody's again
