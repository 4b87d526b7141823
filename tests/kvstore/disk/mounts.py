"""Small real file systems to fill up, to make read-only and to take away. Needs root."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs of so many bytes."""
    folder.mkdir()
    refused = _mount("-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder))
    if refused:
        pytest.skip(f"needs root that may mount (CAP_SYS_ADMIN): {refused}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def _mount(*arguments: str) -> str:
    """Why it was refused."""
    return subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True).stderr.strip()


@contextlib.contextmanager
def mounted_ext4(folder: Path, nbytes: int = 64 * 2**20) -> Iterator[Path]:
    """An ext4 of so many bytes in a file beside the folder."""
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(nbytes)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs e2fsprogs (.ci/system-packages): {error}")
    folder.mkdir()
    refused = _mount("-o", "loop", str(image), str(folder))
    if refused:
        pytest.skip(f"needs root that may mount (CAP_SYS_ADMIN): {refused}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Whoever writes to the file system waits until the end."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)
