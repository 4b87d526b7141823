"""Output of a command: tables for people, JSON lines for programs, problems on stderr.

stdout has only results, so it can be piped. A table is never cut to the terminal's width. Keys are shortened to 16 of
their 32 hex digits unless `long`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from protocol.progress import Progress

SHORT_KEY_DIGITS = 16
_BAR_CELLS = 10
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Output:
    """Output of one command. `command`: its name, for example `kvctl`. With `as_json`, `line` and `header` print
    nothing; otherwise `record` does."""

    def __init__(
        self,
        command: str,
        *,
        as_json: bool = False,
        long: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.long = long
        self.stdout = stdout or sys.stdout
        self.stderr = stderr or sys.stderr
        self.is_terminal = self.stdout.isatty()

    def line(self, text: str = "") -> None:
        if not self.as_json:
            print(text, file=self.stdout, flush=True)

    def record(self, **fields: Any) -> None:
        """Prints a line of JSON if `as_json`."""
        if self.as_json:
            print(json.dumps(fields), file=self.stdout, flush=True)

    def note(self, text: str) -> None:
        """Prints a line for people to stderr, in both modes."""
        print(text, file=self.stderr, flush=True)

    def problem(self, text: str) -> None:
        self.note(f"moonserve {self.command}: {text}")

    def key(self, key: bytes) -> str:
        digits = key.hex()
        return digits if self.long else digits[:SHORT_KEY_DIGITS]

    def progress(self) -> Progress:
        """Returns the progress display of a long operation, a context manager: bars for people, lines for programs."""
        return Progress(self.stderr, bars=not self.as_json)

    def header(self, text: str) -> None:
        self.line(f"{_DIM}{text}{_PLAIN}" if self.is_terminal else text)


class Table:
    """Table that is printed in portions. Columns only grow wider. A `>` before a column's name aligns it right."""

    def __init__(self, output: Output, *columns: str) -> None:
        self._output = output
        self._names = [name.removeprefix(">") for name in columns]
        self._is_right = [name.startswith(">") for name in columns]
        self._widths = [len(name) for name in self._names]
        self._rows: list[Sequence[str]] = []
        self._has_header = False

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def flush(self) -> None:
        """Prints the rows added since the last call, after the header if these are the first."""
        for row in self._rows:
            self._widths = [max(w, len(c)) for w, c in zip(self._widths, row, strict=True)]
        if self._rows and not self._has_header:
            self._output.header(self._format(self._names))
            self._has_header = True
        for row in self._rows:
            self._output.line(self._format(row))
        self._rows = []

    def _format(self, cells: Sequence[str]) -> str:
        columns = zip(cells, self._widths, self._is_right, strict=True)
        texts = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns]
        return "  ".join(texts).rstrip()


def bar(share: float) -> str:
    """Formats a share as `███░░░░░░░`. A share above 0 fills at least one cell."""
    share = min(max(share, 0.0), 1.0)
    full = round(share * _BAR_CELLS) or (1 if share > 0 else 0)
    return "█" * full + "░" * (_BAR_CELLS - full)


def count(number: int, noun: str) -> str:
    """Formats a number with its noun: `1 object`, `2,000 objects`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """Formats bytes as `3.2 GiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Formats bytes per second as `12.34 GB/s`."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"
