"""Restarts on purpose: one process after the other, the next when everything serves again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deploy.ray.process import Process
from deploy.ray.units import Kind

# The conductors late: a new leader knows nothing of requests that another one placed.
_ORDER = (
    *(Kind.STORE, Kind.PREFILL, Kind.DECODE),
    *(Kind.GATEWAY, Kind.CONDUCTOR, Kind.DIRECTORY),
)


class RollingRestart:
    """Names of those that are still to be restarted, and of the one that is."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._current: str | None = None

    @property
    def is_under_way(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def add(self, processes: Iterable[Process]) -> None:
        """Those that wait already keep their turns."""
        ordered = sorted(processes, key=lambda p: (_ORDER.index(p.unit.kind), p.unit.number))
        self._waiting += [p.name for p in ordered if p.name not in self._waiting]

    def next(self, processes: Mapping[str, Process]) -> Process | None:
        """Who is to restart now that everything serves, and so whoever was restarted last does."""
        self._current = None
        while self._waiting:
            process = processes.get(self._waiting.pop(0))
            if process is not None:
                self._current = process.name
                return process
        return None

    def forget(self, name: str) -> None:
        """It is gone; if it comes again it is new anyway."""
        if self._current == name:
            self._current = None

    def cancel(self) -> None:
        self._waiting.clear()

    def validate(self, processes: Mapping[str, Process]) -> None:
        assert self._current is None or self._current in processes
        assert len(set(self._waiting)) == len(self._waiting)
