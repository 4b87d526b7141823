"""What a piece of a node's key index says about one key, and whether it still says so later. Pure.

Its rule: bytes that were read between two looks at the same entry count when the two are equal to the bit; the entry's
tag turns whenever its object moves. Knows neither how the piece was read nor what the object holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.client.fate import Fate
from kvstore.native.base import Entry
from kvstore.native.layout import SLOT, entry_of, is_sealed
from kvstore.native.reader import Miss, scan
from protocol.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and the bytes that said so."""

    entry: Entry
    slot: bytes


def look(run: bytes, key: BlockKey) -> Found | Fate:
    """From the slots that begin at the key's home. ABSENT is a hint, unless nothing changed meanwhile."""
    slot = _slot_of(run, key)
    if slot is None:
        return Fate.ABSENT if scan(run, key) is Miss.ABSENT else Fate.ASK
    # Whatever lies before it in the run: a whole entry under this key was there when it was read.
    fields = SLOT.unpack(slot)
    return Found(entry_of(fields), slot) if fields[2] and is_sealed(fields) else Fate.ASK


def unchanged(found: Found, run: bytes, key: BlockKey) -> bool:
    """Whether a later look at the same place sees the same entry."""
    return _slot_of(run, key) == found.slot


def _slot_of(run: bytes, key: BlockKey) -> bytes | None:
    at = run.find(key)
    while at % SLOT.size and at >= 0:  # by chance across two fields
        at = run.find(key, at + 1)
    return run[at : at + SLOT.size] if at >= 0 else None
