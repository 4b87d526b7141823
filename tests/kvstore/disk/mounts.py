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
        pytest.skip(f"no mounts here: {refused}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def remount(folder: Path, option: str) -> None:
    """`ro` or `rw`. Linux refuses `ro` while a file is open for writing."""
    refused = _mount("-o", f"remount,{option}", str(folder))
    assert not refused, refused


def _mount(*arguments: str) -> str:
    """Why it was refused."""
    return subprocess.run(
        ["mount", *arguments], check=False, capture_output=True, text=True
    ).stderr.strip()
