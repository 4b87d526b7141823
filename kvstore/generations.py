"""How often a folder's node has started: a count that is on disk before it is used, so that it never repeats.

Generations begin with it, and so grow over restarts whatever the clock does.
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
"""Generations per start: a trillion objects. What is left of 64 bits counts the starts."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


def first_generation(folder: Path | None) -> int:
    """Above every generation that a node of this folder has given; blocks. Raises ConfigError."""
    return first_of(_next_incarnation(folder) if folder is not None else 1)


def first_of(incarnation: int) -> int:
    """The first generation of a folder's start, counted from 1."""
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
    """On a full disk: a few bytes of a block that the file has already, which disks write whole or not at all."""
    with path.open("r+") as file:
        file.write(str(incarnation))
        file.flush()
        os.fsync(file.fileno())


FINE_S = 0.02
COARSE_S = 10.0
_NUM_FINE = 4_096
_NUM_COARSE = 9_000


class Mark(NamedTuple):
    """All generations below `generation` were given before `at`, all others not before."""

    at: float
    generation: int


class Reserving:
    """When a node gave its generations, as far as it is remembered.

    A removal heard of late thereby takes what was there when it happened, and not what was stored since.
    """

    def __init__(self) -> None:
        self._fine: deque[Mark] = deque(maxlen=_NUM_FINE)
        self._coarse: deque[Mark] = deque(maxlen=_NUM_COARSE)

    def note(self, now: float, next_generation: int) -> None:
        """The next generation is about to be given."""
        if self._fine and now - self._fine[-1].at < FINE_S:
            return
        self._fine.append(Mark(now, next_generation))
        if not self._coarse or now - self._coarse[-1].at >= COARSE_S:
            self._coarse.append(self._fine[-1])

    def before(self, at: float, next_generation: int) -> int:
        """A bound: what was given before `at` is below it."""
        marks = self._fine if self._fine and self._fine[0].at <= at else self._coarse
        later = next((mark for mark in (*marks, *self._fine) if mark.at >= at), None)
        return next_generation if later is None else later.generation
