"""What becomes of one object that is looked for at one node, when it is not simply read. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import TypeVar

from protocol.errors import InvalidRequest

T = TypeVar("T")


class Fate(Enum):
    """Neither of them is an error: the caller goes on elsewhere, or asks."""

    ABSENT = auto()
    """The node has it not."""
    ASK = auto()
    """Only the node itself can tell, or bring it to memory."""
    CORRUPT = auto()
    """Its bytes do not match its checksum, and it has not changed meanwhile."""


def too_small(length: int, capacity: int) -> InvalidRequest:
    return InvalidRequest(
        f"the value has {length} bytes, the room for it {capacity}", param="length"
    )
