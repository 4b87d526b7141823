"""Displays the processes of a cluster while it starts, runs and stops.

On a terminal, a table is redrawn in place. Elsewhere, each change of a process's stage prints one line. Output that
cannot be written, for example to a full disk, is dropped.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.local import READY
from deploy.supervisor import Child

_STYLES = {"ready": "green", "restarting": "red"}


class Display:
    """Display of the stages and addresses of one launcher's processes."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._children: list[Child] = []
        self._shown: dict[str, str] = {}  # stage already printed, per instance
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._table, transient=True)

    def follow(self, children: list[Child]) -> None:
        """Displays these processes from now on. The caller may add to the list."""
        self._children = children
        if self._console.is_terminal:
            self._live.start()

    def refresh(self) -> None:
        """Updates the display after a process has reported a change."""
        if self._live.is_started:
            with contextlib.suppress(OSError):
                self._live.refresh()
            return
        for child in self._children:
            name = child.spec.instance_id
            if self._shown.get(name) != child.stage:
                self._shown[name] = child.stage
                self._print(f"{name:12} {child.stage}", markup=False)

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def show_start(self, model_path: Path, log_dir: Path) -> None:
        self._print(f"model {model_path}", markup=False)
        self._print(f"logs  {log_dir}", markup=False)

    def show_ready(self) -> None:
        """Prints the table of processes, the ready line and a command to try."""
        self.close()
        url = next(c.facts["http"] for c in self._children if "http" in c.facts)
        self._print(self._table())
        self._print(f"{READY} {url}   dashboard {url}/dashboard")
        self._print("Try it:")
        self._print(
            f"  curl {url}/v1/completions -H 'Content-Type: application/json' "
            '-d \'{"prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0.7}\'',
            markup=False,
        )
        self._print(f"Ctrl-C stops everything; kill -USR1 {os.getpid()} restarts it while it serves.")

    def show_restarted(self, outcome: str) -> None:
        """Prints the outcome of a rolling restart."""
        self._print(outcome, markup=False)

    def show_stopping(self) -> None:
        self._print("stopping …")

    def _print(self, what: Any, **how: Any) -> None:
        with contextlib.suppress(OSError):
            self._console.print(what, **how)

    def _table(self) -> Table:
        names = ("process", "pid", "state", "where")
        table = Table(*names, box=None, pad_edge=False, header_style="dim")
        for child in self._children:
            is_under_way = child.fraction is not None and child.stage != "ready"
            state = f"{child.stage} {child.fraction:.0%}" if is_under_way else child.stage
            table.add_row(
                child.spec.instance_id,
                str(child.pid or ""),
                Text(state, style=_STYLES.get(child.stage, "yellow")),
                child.facts.get("http") or child.facts.get("rpc", ""),
            )
        return table
