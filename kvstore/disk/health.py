"""Health of a disk, derived from its errors and waits. Pure: errors and time in, health out.

A full disk is healthy: it refuses what does not fit, and for a while no writes are tried. Knows no files.
"""

import errno
import threading
from collections import Counter
from collections.abc import Callable
from enum import Enum
from time import monotonic

from moonserve.kvstore.disk.base import Health, HealthChanged

FULL_FOR_S = 5.0
"""Seconds during which a full disk gets no writes."""
READ_ERRORS_IN_A_ROW = 3
"""Read errors in a row until the disk counts as failed: a bad sector costs one object, a dead disk delays all reads."""

FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
_GONE = {errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOMEDIUM}
_ORDER = (Health.GOOD, Health.READ_ONLY, Health.FAILED)


class DiskOperation(Enum):
    READ = "read"
    WRITE = "write"


class DiskHealth:
    """Current health of a disk. Calls `changed` with each new health and its reason."""

    def __init__(self, changed: HealthChanged, counters: Counter[str]) -> None:
        self.current = Health.GOOD
        self._changed = changed
        self._counters = counters
        self._full_until = float("-inf")
        self._read_errors = 0

    def may_read(self) -> bool:
        return self.current is not Health.FAILED

    def may_write(self, now: float) -> bool:
        return self.current is Health.GOOD and now >= self._full_until

    def read_succeeded(self) -> None:
        self._read_errors = 0

    def failed(self, doing: DiskOperation, error: OSError, now: float) -> None:
        """Records an operation that ended with `error`."""
        self._counters[f"errors_{errno.errorcode.get(error.errno or 0, 'other')}"] += 1
        if error.errno in FULL_ERRORS:
            self._full_until = now + FULL_FOR_S
        elif error.errno in _GONE:
            self._worsen(Health.FAILED, f"the disk or its folder is gone: {error}")
        elif doing is DiskOperation.WRITE:
            self._worsen(Health.READ_ONLY, f"the disk cannot be written to: {error}")
        else:
            self._read_errors += 1
            if self._read_errors >= READ_ERRORS_IN_A_ROW:
                self._worsen(Health.FAILED, f"the disk cannot be read: {error}")

    def report_hang(self, waited_s: float) -> None:
        """Records that the disk has not answered for `waited_s`."""
        self._counters["disk_hangs"] += self.current is not Health.FAILED
        self._worsen(Health.FAILED, f"the disk has not answered for {waited_s:.0f} s")

    def set_health(self, health: Health, reason: str) -> None:
        """Sets the health found by a check."""
        if health is Health.GOOD:
            self._read_errors = 0
        if health is not self.current:
            self.current = health
            self._changed(health, reason)

    def _worsen(self, health: Health, reason: str) -> None:
        if _ORDER.index(health) > _ORDER.index(self.current):
            self.set_health(health, reason)


Clock = Callable[[], float]


class HangTracker:
    """Tracks how long the disk has not answered. Used as a context manager around calls that may hang.

    Contexts of one thread nest: leaving an inner one also counts as progress.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._since: dict[int, tuple[int, float]] = {}
        """Nesting depth and time of the last progress, by thread."""

    def __enter__(self) -> None:
        thread = threading.get_ident()
        depth, _ = self._since.get(thread, (0, 0.0))
        self._since[thread] = depth + 1, self._clock()

    def __exit__(self, *exc_info: object) -> None:
        thread = threading.get_ident()
        depth, _ = self._since.pop(thread)
        if depth > 1:
            self._since[thread] = depth - 1, self._clock()

    @property
    def now(self) -> float:
        return self._clock()

    def longest_s(self) -> float:
        """Returns the longest current wait; 0.0 if no thread waits."""
        begun = [since for _, since in list(self._since.values())]
        return self._clock() - min(begun) if begun else 0.0

    def validate(self) -> None:
        """Asserts that every waiting thread is in at least one context."""
        assert all(depth > 0 for depth, _ in list(self._since.values()))
