"""What a piece of a node's key index says about one key, and whether it still says so later. Pure.

Its rule: bytes that were read between two looks at the same entry count when the two are equal to the bit; the entry's
tag turns whenever its object moves. Knows neither how the piece was read nor what the object holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.client.fate import Fate
from kvstore.native.base import Entry
from kvstore.native.layout import SLOT
from kvstore.native.reader import Miss, scan
from protocol.keys import KEY_BYTES, BlockKey


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and the bytes that said so."""

    entry: Entry
    slot: bytes


def look(run: bytes | memoryview, key: BlockKey) -> Found | Fate:
    """From the slots that begin at the key's home. ABSENT is a hint, unless nothing changed meanwhile."""
    answer = scan(run, key)
    if isinstance(answer, Entry):
        return Found(answer, _slot_of(run, key))
    return Fate.ABSENT if answer is Miss.ABSENT else Fate.ASK


def unchanged(found: Found, run: bytes | memoryview, key: BlockKey) -> bool:
    """Whether a later look at the same place sees the same entry."""
    answer = scan(run, key)
    return isinstance(answer, Entry) and _slot_of(run, key) == found.slot


def _slot_of(run: bytes | memoryview, key: BlockKey) -> bytes:
    """`key` is there."""
    starts = range(0, len(run), SLOT.size)
    at = next(start for start in starts if run[start : start + KEY_BYTES] == key)
    return bytes(run[at : at + SLOT.size])
