"""Runs functions in the event loop's thread on behalf of other threads, which wait for the result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from protocol.errors import PeerLost

T = TypeVar("T")


class InLoop:
    """Thread-safe access to one event loop. The loop must run for as long as a thread may wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in the loop's thread and returns or raises its outcome. Raises PeerLost if the loop is closed."""
        done = threading.Lock()  # a lock is the cheapest way to wait for another thread
        done.acquire()
        results: list[T] = []
        errors: list[BaseException] = []

        def act() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again in the waiting thread
                errors.append(error)
            finally:
                done.release()

        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError as error:
            raise PeerLost("this process is stopping") from error
        done.acquire()
        if errors:
            raise errors[0]
        return results[0]
