"""What an elastic pool needs of physical memory: one protocol for host memory and devices.

A backing reserves address ranges that cost nothing, and puts frames of `frame_bytes` behind parts of them or takes them
away. It decides nothing: which frames, where and when is `engine.elastic.state`'s business. Calls for different pages
come from several threads at once; calls for one page never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.elastic.pages import Frame


class MappingFailed(Exception):
    """The machine has no such memory left, whatever the budget says."""


class Range(Protocol):
    """A reserved range of addresses."""

    address: int
    nbytes: int

    @property
    def memory(self) -> memoryview:
        """The range's bytes, writable where mapped. Raises ConfigError for memory that the host cannot address."""

    def map(self, offsets: Sequence[int], span_bytes: int, frames: Sequence[Frame]) -> None:
        """Puts the frames, in this order, behind the bytes [offset, offset + span_bytes) of each offset. What is read
        there is undefined. Raises MappingFailed, with nothing mapped."""

    def unmap(self, offsets: Sequence[int], span_bytes: int, frames: Sequence[Frame]) -> None:
        """Takes away what `map` put there."""

    def close(self) -> None:
        """Gives back everything that is still mapped."""


class Backing(Protocol):
    """Physical memory of one kind."""

    frame_bytes: int

    def reserve(self, nbytes: int) -> Range:
        """A range of `nbytes`, a multiple of `frame_bytes`, of which nothing is mapped. Raises ConfigError."""

    def release(self, frames: Sequence[Frame]) -> None:
        """Frames that lie in no range and will not be used again: gives back what was kept of them."""

    def close(self) -> None:
        """After its ranges: gives back frames that were kept to be used again."""
