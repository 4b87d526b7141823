"""Disks that are damaged behind a node's back, taken away from it, or made read-only under it. Mounting needs root."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from kvstore.disk.base import PAGE


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kv"))


def flip_bits(path: Path, count: int, seed: int, *, first: int = PAGE) -> None:
    """At random places from byte `first` on."""
    rng = random.Random(seed)
    nbytes = path.stat().st_size
    for _ in range(count):
        flip(path, rng.randrange(first, nbytes), 1 << rng.randrange(8))


def flip(path: Path, offset: int, bit: int = 1) -> None:
    """One bit of a byte."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


def find_in(paths: list[Path], content: bytes) -> tuple[Path, int]:
    """Where these bytes lie."""
    for path in paths:
        offset = path.read_bytes().find(content)
        if offset >= 0:
            return path, offset
    raise AssertionError("it is in none of the files")


def fill_up(folder: Path) -> Path:
    """Somebody else takes all that is left of the file system, to the last byte."""
    path = folder / "of-somebody-else"
    with path.open("wb", buffering=0) as file:
        for nbytes in (64 * 1024, 1):
            with pytest.raises(OSError, match="No space left"):
                _fill(file, nbytes)
    return path


def _fill(file: FileIO, nbytes: int) -> None:
    while True:
        file.write(bytes(nbytes))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A mount point is read-only, as after an error of the disk: what is open stays open, Linux opens no more for
    writing."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def take_away(folder: Path) -> None:
    """A mount point: what is open stays open, and by name there is nothing left."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
