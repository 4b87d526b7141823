"""Copies on disk of objects that are in memory too: the next one that may be dropped for others. Pure; drops none.

A hand goes round the rows. It is asked when the disk is full of such copies, so the next one is near, and it takes a
bounded number of steps: a scan of millions of rows would hold readers up.
"""

from __future__ import annotations

from kvstore.native.base import NO_RECORD, Record
from kvstore.records import Records

HAND_STEPS = 4096


class SpareCopies:
    """Of one node's rows."""

    def __init__(self, rows: Records) -> None:
        self._rows = rows
        self._hand = 0

    def next(self) -> Record:
        """NO_RECORD when none was found within so many steps."""
        num_rows = len(self._rows.holds)
        for _ in range(min(num_rows, HAND_STEPS)):
            self._hand = (self._hand + 1) % num_rows
            if self._rows.is_copied(self._hand):
                return self._hand
        return NO_RECORD
