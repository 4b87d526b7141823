"""Generations of a node: the durable count of its starts, and when generations were assigned.

The high bits of a generation count the starts of the folder's node. The count is on disk before it is used, so that
generations never repeat and grow over restarts, whatever the clock does.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

from kvstore.disk.files import replace_durably
from protocol.errors import ConfigError

FILE_NAME = "incarnation"
OBJECTS_BITS = 40
"""Low bits of a generation: a trillion objects per start. The other 24 of 64 bits count the starts."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


def first_generation(folder: Path | None) -> int:
    """Counts a new start and returns its first generation, above all earlier ones of this folder. Blocks. Raises
    ConfigError if the folder cannot be used."""
    return first_of(_next_incarnation(folder) if folder is not None else 1)


def first_of(incarnation: int) -> int:
    """Returns the first generation of a start. Starts are counted from 1."""
    return incarnation << OBJECTS_BITS


def _next_incarnation(folder: Path) -> int:
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        incarnation = int(path.read_text()) + 1 if path.exists() else 1
        _write(path, incarnation)
    except OSError as error:
        raise ConfigError(f"cannot use {folder} for objects: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged; delete the folder {folder}, whose objects cannot be told from newer ones"
        ) from error
    return incarnation


def _write(path: Path, incarnation: int) -> None:
    try:
        replace_durably(path, str(incarnation))
    except OSError as error:
        if error.errno not in _FULL or not path.exists():
            raise
        _overwrite(path, incarnation)


def _overwrite(path: Path, incarnation: int) -> None:
    """Overwrites the count in place on a full disk: a few bytes in one existing block, which disks write atomically."""
    with path.open("r+") as file:
        file.write(str(incarnation))
        file.flush()
        os.fsync(file.fileno())


FINE_S = 0.02
COARSE_S = 10.0
_NUM_FINE = 4_096
_NUM_COARSE = 9_000


class Mark(NamedTuple):
    """Generations below `generation` were assigned before `at`, all others at `at` or later."""

    at: float
    generation: int


class Reserving:
    """Remembers when a node assigned its generations, within limits.

    With it, a removal that is reported late removes only the objects that were there when it happened.
    """

    def __init__(self) -> None:
        self._fine: deque[Mark] = deque(maxlen=_NUM_FINE)
        self._coarse: deque[Mark] = deque(maxlen=_NUM_COARSE)

    def note(self, now: float, next_generation: int) -> None:
        """Notes that `next_generation` is about to be assigned at `now`."""
        if self._fine and now - self._fine[-1].at < FINE_S:
            return
        self._fine.append(Mark(now, next_generation))
        if not self._coarse or now - self._coarse[-1].at >= COARSE_S:
            self._coarse.append(self._fine[-1])

    def before(self, at: float, next_generation: int) -> int:
        """Returns a bound: generations that were assigned before `at` are below it."""
        marks = self._fine if self._fine and self._fine[0].at <= at else self._coarse
        later = next((mark for mark in (*marks, *self._fine) if mark.at >= at), None)
        return next_generation if later is None else later.generation
