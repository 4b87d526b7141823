"""The drain mark, a file that tells a node's next life that the node is draining."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.lasting import DrainMark


async def test_what_is_asked_for_while_the_disk_takes_its_time_comes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going_on = threading.Event(), threading.Event()
    touch = Path.touch

    def slow_touch(path: Path, *args: Any) -> None:
        begun.set()
        going_on.wait()
        touch(path, *args)

    monkeypatch.setattr(Path, "touch", slow_touch)
    mark = DrainMark(tmp_path)
    first = asyncio.create_task(mark.keep(True))
    await asyncio.to_thread(begun.wait)
    second = asyncio.create_task(mark.keep(False))
    await asyncio.wait({second}, timeout=0.05)  # ends early if it wrongly does not wait
    going_on.set()
    await asyncio.gather(first, second)
    assert not mark.is_set()


async def test_a_disk_that_refuses_is_told_of_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await DrainMark(tmp_path / "gone").keep(True)
    assert "will not know" in caplog.text
    await DrainMark(None).keep(True)
    assert not DrainMark(None).is_set()
