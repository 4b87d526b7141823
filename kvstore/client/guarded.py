"""An engine whose slices carry checksums: for parts of objects, which no checksum of the whole verifies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.client.scratch import Scratch
from transfer import Segment, TransferEngine


class Guarded:
    """Made when it is first needed: few programs read parts. Thread-safe."""

    def __init__(self, make: Callable[[], TransferEngine]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: tuple[TransferEngine, Scratch] | None = None

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[tuple[TransferEngine, Segment]]:
        """The engine, and memory of it."""
        with self._lock:
            if self._made is None:
                engine = self._make()
                self._made = engine, Scratch(engine)
            engine, scratch = self._made
        with scratch.borrow(nbytes) as segment:
            yield engine, segment

    def close(self) -> None:
        """Nobody uses it any more. Idempotent."""
        if self._made is not None:
            engine, scratch = self._made
            scratch.close()
            engine.close()
