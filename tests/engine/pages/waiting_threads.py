"""Allocations that wait, each in a thread of its own, begun one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Self

from engine.pages.base import PageCore
from tests.patience import PATIENCE_S


class Waiting:
    """Runs calls that are to wait; `begin` returns when the call is in the pool's line. Ends when all have."""

    def __init__(self, core: PageCore) -> None:
        self._barriers: queue.Queue[int] = queue.Queue()
        self._set_barrier = core.set_barrier
        core.set_barrier = self._told  # type: ignore[method-assign]
        self._threads: list[threading.Thread] = []
        self.outcomes: dict[str, object] = {}

    def _told(self, barrier: int) -> None:
        self._set_barrier(barrier)
        self._barriers.put(barrier)

    def begin(self, name: str, call: Callable[[], object]) -> None:
        def run() -> None:
            try:
                self.outcomes[name] = call()
            except Exception as error:
                self.outcomes[name] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        assert self._barriers.get(timeout=PATIENCE_S) > 0, "it did not have to wait"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it still waits"
