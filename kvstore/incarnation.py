"""How often a folder's node has started: a count that is on disk before it is used, so that it never repeats.

Generations begin with it, and so grow over restarts whatever the clock does.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
        _replace(path, incarnation)
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


def _replace(path: Path, incarnation: int) -> None:
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("w") as file:
            file.write(str(incarnation))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
