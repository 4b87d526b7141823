"""Asks the event loop's thread to do something, and waits for what it gives. Knows nothing of what it does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from protocol.errors import PeerLost

T = TypeVar("T")


class InLoop:
    """Thread-safe. The loop must run for as long as somebody may wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises PeerLost when the loop has ended."""
        done = threading.Lock()  # the cheapest way to wait for another thread
        done.acquire()
        results: list[T] = []
        errors: list[BaseException] = []

        def act() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised where the result is waited for
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
