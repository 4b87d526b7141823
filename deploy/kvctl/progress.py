"""How far a long command is: a bar on a terminal, else a line every few seconds; always on stderr."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from deploy.kvctl.output import Output, duration

LINE_EVERY_S = 5.0


class Steps:
    """Several tasks under way at once, each with a total that may change. Use as a context manager."""

    def __init__(self, output: Output) -> None:
        self._output = output
        console = Console(file=output.stderr, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True)
        self._is_live = console.is_terminal and not output.as_json
        self._tasks: dict[str, TaskID] = {}
        self._started_at = time.monotonic()
        self._said_at: dict[str, float] = {}

    def __enter__(self) -> Steps:
        if self._is_live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._bars.stop()

    def show(self, name: str, done: float, total: float, text: str) -> None:
        """`text` says in the task's own units how far it is."""
        if self._is_live:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=total, text=text)
            self._bars.update(self._tasks[name], completed=done, total=total, text=text)
        else:
            self._say(name, done, total, text)

    def _say(self, name: str, done: float, total: float, text: str) -> None:
        now = time.monotonic()
        if now - self._said_at.setdefault(name, self._started_at) >= LINE_EVERY_S and done < total:
            self._said_at[name] = now
            left_s = (now - self._started_at) * (total - done) / done if done else None
            eta = f", {duration(left_s)} left" if left_s is not None else ""
            self._output.note(f"{name}: {text}{eta}")
