"""SIGKILL at any moment: what was acknowledged is there again, what was forgotten is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvstore.disk.child import object_of
from tests.kvstore.disk.tiers import opened


def run_and_kill(folder: Path, first: int, lines: int) -> list[tuple[str, int]]:
    """What a child said until it was killed, in the middle of something, after so many lines."""
    command = [sys.executable, "-m", "tests.kvstore.disk.child", str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = []
        for line in child.stdout:
            said.append(line)
            if len(said) == lines:
                child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    return [(line[0], int(line[2:])) for line in said if line.endswith("\n")]


async def check(
    folder: Path, certain: set[int], perhaps: set[int], forgotten: set[int]
) -> set[int]:
    """What is there after a crash."""
    async with opened(folder) as stand:
        found = {about.generation for about in stand.owner.places}
        assert certain <= found
        assert not forgotten & found
        for about in stand.owner.places:
            expected = object_of(about.generation)
            assert about == expected.object
            assert await stand.get(about) == bytes(expected.memory)
    return found


@pytest.mark.parametrize("lines", [1, 7, 150, 700])
async def test_nothing_acknowledged_is_lost_and_nothing_forgotten_returns(
    tmp_path: Path, lines: int
) -> None:
    """Three lives each; the later ones compact what the earlier ones left."""
    held: set[int] = set()
    forgotten: set[int] = set()
    first = 1
    for _ in range(3):
        said = run_and_kill(tmp_path, first, lines)
        perhaps: set[int] = set()
        for sign, number in said:
            first = max(first, number + 10)
            if sign == "+":
                held.add(number)
            elif sign == "?":
                held.discard(number)
                perhaps.add(number)
            else:
                forgotten.add(number)
        held = await check(tmp_path, held, perhaps - forgotten, forgotten)
