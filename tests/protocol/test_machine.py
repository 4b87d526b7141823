"""Facts about the machine."""

from __future__ import annotations

from pathlib import Path

from protocol.machine import cache_folder, processor


def test_the_cache_folder_follows_the_xdg_specification() -> None:
    home = Path("/home/someone")
    assert cache_folder({}, home) == home / ".cache/moonserve"
    assert cache_folder({"XDG_CACHE_HOME": "/c"}, home) == Path("/c/moonserve")


def test_the_processor_has_a_stable_name() -> None:
    assert processor()
    assert processor() == processor()
