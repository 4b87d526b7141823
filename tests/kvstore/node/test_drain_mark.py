"""The drain mark, a file that tells a node's next life that the node is draining."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from moonserve.kvstore.node.remove_pin_drain import DrainMark


async def test_requests_during_slow_write_are_queued_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, going_on = threading.Event(), threading.Event()
    touch = Path.touch

    def slow_touch(path: Path, *args: Any) -> None:
        begun.set()
        going_on.wait()
        touch(path, *args)

    monkeypatch.setattr(Path, "touch", slow_touch)
    mark = DrainMark(tmp_path)
    first = asyncio.create_task(mark.save(True))
    await asyncio.to_thread(begun.wait)
    second = asyncio.create_task(mark.save(False))
    await asyncio.wait({second}, timeout=0.05)  # ends early if it wrongly does not wait
    going_on.set()
    await asyncio.gather(first, second)
    assert not mark.is_set()


async def test_drain_mark_that_cannot_be_saved_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await DrainMark(tmp_path / "gone").save(True)
    assert "cannot be saved" in caplog.text
    await DrainMark(None).save(True)
    assert not DrainMark(None).is_set()
