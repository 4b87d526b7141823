"""Progress is bars on a terminal, sparse lines elsewhere, and nothing of what was soon done."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

from protocol.progress import LINE_EVERY_S, Progress, duration
from tests.terminal import terminal


class Clock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_every_few_seconds() -> None:
    log, clock = StringIO(), Clock()
    with Progress(log, clock=clock) as progress:
        for done in range(11):
            clock.now = done * LINE_EVERY_S / 2
            progress.show("copying", done, 10, f"{done} of 10 objects")
    lines = log.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "copying: 2 of 10 objects, 20.0 s left"
    assert "10 of 10" not in log.getvalue(), "the result says so"


def test_what_is_soon_done_leaves_no_line_and_something_of_unknown_length_its_name() -> None:
    log = StringIO()
    with Progress(log, clock=Clock()) as progress:
        for done in range(100):
            progress.show("copying", done, 100, "")
        with progress.busy("measuring"):
            assert log.getvalue() == "measuring …\n"


def test_who_wants_no_lines_gets_none() -> None:
    log, clock = StringIO(), Clock()
    with Progress(log, lines=False, clock=clock) as progress:
        clock.now = 2 * LINE_EVERY_S
        progress.show("copying", 1, 2, "")
        progress.note("a note")
        with progress.busy("measuring"):
            pass
    assert not log.getvalue()


PROGRAM = """
from protocol.progress import Progress
with Progress() as progress:
    progress.show("copying", 5, 10, "5 of 10 objects")
    input()
    progress.note("half of it is there")
    with progress.busy("measuring"):
        input()
print("done")
"""


def test_on_a_terminal_there_are_bars_and_then_none(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with terminal([sys.executable, str(tmp_path / "program.py")], environ) as shown:
        shown.wait_for("copying.*5 of 10 objects")
        shown.type("\n")
        shown.wait_for("half of it is there")
        shown.wait_for("measuring")
        shown.type("\n")
        shown.wait_for("done")
        assert shown.ended() == 0


def test_durations_are_in_the_unit_that_people_use() -> None:
    assert [duration(s) for s in (0.01, 75, 7_320)] == ["0.1 s", "1 min 15 s", "2 h 2 min"]
