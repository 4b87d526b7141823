"""Disks that are full, frozen, read-only, taken away, or damaged behind a node's back. Mounting needs root."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from kvstore.disk.base import PAGE


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs of so many bytes."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs"):
        yield folder


@contextlib.contextmanager
def mounted_ext4(folder: Path, nbytes: int = 64 * 2**20) -> Iterator[Path]:
    """An ext4 of so many bytes in a file beside the folder."""
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(nbytes)
    try:
        run("mkfs.ext4", "-q", "-F", str(image))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs e2fsprogs (.ci/system-packages): {error}")
    with _mounted(folder, "-o", "loop", str(image)):
        yield folder


@contextlib.contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir()
    try:
        run("mount", *arguments, str(folder))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs root that may mount (CAP_SYS_ADMIN): {error.stderr.decode()}")
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # it was taken away
            take_away(folder)


def take_away(folder: Path) -> None:
    """A mount point: what is open stays open, and by name there is nothing left."""
    run("umount", "--lazy", str(folder))


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Whoever writes to the file system waits until the end."""
    run("fsfreeze", "--freeze", str(folder))
    try:
        yield
    finally:
        run("fsfreeze", "--unfreeze", str(folder))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A mount point is read-only, as after an error of the disk: what is open stays open, Linux opens no more for
    writing."""
    run("mount", "--bind", str(folder), str(folder))
    run("mount", "-o", "remount,bind,ro", str(folder))
    try:
        yield
    finally:
        take_away(folder)


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


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kv"))


def flip_bits(path: Path, count: int, seed: int) -> None:
    """At random places behind the head."""
    rng = random.Random(seed)
    nbytes = path.stat().st_size
    for _ in range(count):
        flip(path, rng.randrange(PAGE, nbytes), 1 << rng.randrange(8))


def flip(path: Path, offset: int, bit: int = 1) -> None:
    """One bit of a byte."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bit]))
