"""Work that continues in threads while a test does something else, until the end of a `with` block."""

import threading
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self


class Background:
    """Runs each of `loops` in a thread until `stopping` is set. A failure in a loop fails the block."""

    ends_within_s: float | None = None  # once `stopping` is set

    def __init__(self, loops: Iterable[Callable[[], None]]) -> None:
        self.stopping = threading.Event()
        self.failures: list[str] = []
        self.lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(loop,)) for loop in loops]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            assert not self.failures, "\n".join(self.failures)

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(self.ends_within_s)
            assert not thread.is_alive(), "a call has no end"

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # reported by the test's thread
            self.failures.append("".join(traceback.format_exception(error)))
