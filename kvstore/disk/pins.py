"""Pins that were changed after their objects were written: what the log says of them. Pure.

A change has a number from the same row as the generations of objects: it counts for the object that had the key then,
which is the one with an earlier generation, and of several changes the latest counts.
"""

from __future__ import annotations

from dataclasses import replace

from kvstore.disk.base import DiskObject, Pin
from kvstore.disk.format import Tombstone
from protocol.keys import BlockKey


class Pins:
    """Of one folder; about 200 bytes for each key whose pin was changed."""

    def __init__(self) -> None:
        self._latest: dict[BlockKey, tuple[int, Pin]] = {}

    def note(self, change: Tombstone) -> None:
        """One that has a pin."""
        assert change.pin is not None
        known = self._latest.get(change.key)
        if known is None or change.generation > known[0]:
            self._latest[change.key] = change.generation, change.pin

    def current(self, about: DiskObject) -> DiskObject:
        """With the pin that it has now."""
        number, pin = self._latest.get(about.key, (0, about.pin))
        return about if number < about.generation or pin is about.pin else replace(about, pin=pin)
