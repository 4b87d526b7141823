"""Makes disks full, frozen, read-only, unmounted, or damaged without the node's knowledge. Mounting needs root."""

import contextlib
import itertools
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonserve.kvstore.disk.base import PAGE


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mounts a tmpfs of `nbytes`."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs"):
        yield folder


@contextlib.contextmanager
def mounted_ext4(folder: Path, nbytes: int = 64 * 2**20) -> Iterator[Path]:
    """Mounts an ext4 file system of `nbytes`, which lies in a file next to the folder."""
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
        with contextlib.suppress(subprocess.CalledProcessError):  # the test has unmounted it
            take_away(folder)


def take_away(folder: Path) -> None:
    """Unmounts a mount point lazily: open files stay open, but none can be found by name."""
    run("umount", "--lazy", str(folder))


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Freezes the file system: writes to it block until the context ends."""
    run("fsfreeze", "--freeze", str(folder))
    try:
        yield
    finally:
        run("fsfreeze", "--unfreeze", str(folder))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a mount point read-only, as Linux does after a disk error: open files stay open, but no file can be opened
    for writing."""
    run("mount", "--bind", str(folder), str(folder))
    run("mount", "-o", "remount,bind,ro", str(folder))
    try:
        yield
    finally:
        take_away(folder)


def fill_up(folder: Path) -> Path:
    """Fills the file system to the last byte with a file that is not the node's, and returns its path."""
    path = folder / "of-somebody-else"
    with path.open("wb", buffering=0) as file:
        for nbytes in (64 * 1024, 1):
            with pytest.raises(OSError, match="No space left"):
                file.writelines(itertools.repeat(bytes(nbytes)))
    return path


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kv"))


def flip_bits(path: Path, count: int, seed: int) -> None:
    """Flips `count` bits at random offsets after the file's first page."""
    rng = random.Random(seed)
    nbytes = path.stat().st_size
    for _ in range(count):
        flip(path, rng.randrange(PAGE, nbytes), 1 << rng.randrange(8))


def flip(path: Path, offset: int, bit: int = 1) -> None:
    """Inverts the given bit of the byte at `offset`."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bit]))
