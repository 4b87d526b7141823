"""Progress display of commands on stderr: bars on a terminal, otherwise a line every few seconds.

Stdout is reserved for results, so that a pipe gets nothing else. A terminal is left as it was. Short tasks leave no
line in a log. Long-lived processes report to their starter instead (`protocol.process.lifecycle`).
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

LINE_EVERY_S = 5.0


class ProgressBars:
    """Progress of several concurrent tasks, each with a total that may change. Use it as a context manager."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        bars: bool = True,
        lines: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bars` enables bars on a terminal, `lines` enables lines otherwise. `clock` returns monotonic seconds."""
        self._stream = stream or sys.stderr
        console = Console(file=self._stream, highlight=False)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._is_live = console.is_terminal and bars
        self._has_lines = lines and not self._is_live
        self._clock = clock
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, tuple[float, float]] = {}  # when a task was first shown, and what was done then
        self._printed_at: dict[str, float] = {}

    def __enter__(self) -> "ProgressBars":
        if self._is_live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._bars.stop()

    def show(self, name: str, done: float, total: float, text: str, left_s: float | None = None) -> None:
        """Updates a task. `text` is its progress in the task's own units. `left_s` is the caller's estimate of the time
        left; without one, the rest is assumed to take as long as what was done since the task was first shown."""
        now = self._clock()
        began_at, before = self._began.setdefault(name, (now, done))
        if left_s is None and done > before:
            left_s = (now - began_at) * (total - done) / (done - before)
        if left_s:
            text += f", {duration(left_s)} left"
        if self._is_live:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=total, text=text)
            self._bars.update(self._tasks[name], completed=done, total=total, text=text)
        elif now - self._printed_at.setdefault(name, began_at) >= LINE_EVERY_S and done < total:
            self._printed_at[name] = now
            self.note(f"{name}: {text}")

    @contextlib.contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Shows a task of unknown duration within the block, in lines only if it takes long."""
        if not self._is_live:
            late = threading.Timer(LINE_EVERY_S, self.note, [f"{name} …"])
            late.start()
            try:
                yield
            finally:
                late.cancel()
            return
        task = self._bars.add_task(name, total=None, text="")
        try:
            yield
        finally:
            self._bars.remove_task(task)

    def note(self, text: str) -> None:
        """Prints a line that stays, above the bars."""
        if self._is_live:
            self._bars.console.print(text, markup=False, soft_wrap=True)
        elif self._has_lines:
            print(text, file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Formats a duration, for example `0.3 s`, `2 min 5 s`, `3 h 20 min`."""
    if seconds < 60:
        return f"{max(seconds, 0.1):.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
