"""An event loop in a thread of its own, for actors: Ray's own loop ends with the call that needed it, and is another
one in each release."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._held: set[Any] = set()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """Waits for it, in a thread that is not the loop's."""
        return asyncio.run_coroutine_threadsafe(body, self._loop).result()

    def begin(self, body: Coroutine[Any, Any, None]) -> None:
        """Held until it ends."""
        future = asyncio.run_coroutine_threadsafe(body, self._loop)
        self._held.add(future)
        future.add_done_callback(self._held.discard)
