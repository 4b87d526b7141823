"""Windows: which bytes peers may write, and until when.

A window is a right to some ranges of one segment. Its rule: closing it waits for stores in flight and refuses all later
ones, and an id is never reused. Stores happen elsewhere: inside `with window:`, in steps short enough to wait for, by a
device that has a revocable `WindowHold`, or by an initiator that has a `WriteLease`.
"""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moonserve.protocol.errors import InvalidRequest, StaleLease
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import address_of, data_plane
from moonserve.transfer.memory.memfd import PeerMemory
from moonserve.transfer.memory.scatter import LENGTH, REMOTE, Rows
from moonserve.transfer.memory.segments import Segment

_REVOKE_AFTER_S = 0.1
"""Time that a close waits for holds to end before it revokes them: many times what a device needs for a slice."""
_CLOSED = 1 << 62
"""Flag of a window's state, whose rest is the number of stores in flight (native/windows.h)."""
_POLL_S = 0.0002
"""Interval at which a close looks for stores in flight, which notify nobody."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowHold:
    """Keeps a window in use, until `release`, for stores that this process cannot count."""

    window: "Window"
    revoke: Callable[[], None]

    def release(self) -> None:
        """Ends the hold: none of its stores can happen any more. Idempotent."""
        self.window.release_hold(self)


LEASE_BYTES = 4096
"""Size of `Lease` of leased_writes.h, rounded up."""


class WriteLease:
    """An initiator's right to store into a window itself, in a page that both processes map (leased_writes.h)."""

    def __init__(self, window: "Window", page: PeerMemory, process: int) -> None:
        """Begins the lease of the initiator with that pid. Raises StaleLease if the window is closed, InvalidRequest if
        it has too many ranges."""
        self._window, self._page, self._process = window, page, process
        window.begin_lease(self, page.base)

    def end(self) -> None:
        """Waits until the initiator stores nothing under the lease, and never will."""
        data_plane().library.lease_end(self._page.base, self._window.window_id, self._process)
        self._window.leases.discard(self)

    def end_if_idle(self) -> bool:
        """Returns False if the initiator is storing. It may not begin again."""
        return bool(data_plane().brief.lease_end_if_idle(self._page.base, self._window.window_id))


class Window:
    """A right to write; as a context manager it covers one store."""

    __slots__ = (
        "_changed",
        "_holds",
        "_native",
        "_state",
        "ends",
        "leases",
        "native",
        "segment",
        "starts",
        "window_id",
    )

    def __init__(self, window_id: int, segment: Segment, ranges: Sequence[tuple[int, int]]) -> None:
        merged = data_plane().joined(scatter.rows(*((at, at, length) for at, length in sorted(ranges))))
        self.window_id = window_id
        self.segment = segment
        self.starts = np.ascontiguousarray(merged[:, REMOTE])
        self.ends = self.starts + merged[:, LENGTH]
        self._changed = threading.Condition(threading.Lock())
        self._native = data_plane().brief
        self._state = ctypes.c_int64()
        bounds = address_of(self.starts), address_of(self.ends), len(self.ends)
        self.native = ctypes.addressof(self._state), *bounds
        """Addresses of its state, and of the starts and ends of its ranges in order; the number of ranges."""
        self._holds: set[WindowHold] = set()
        self.leases: set[WriteLease] = set()

    def require_inside(self, rows: Rows) -> None:
        """Checks that each run lies within one range. Raises InvalidRequest otherwise."""
        scatter.require_inside(rows, REMOTE, self.segment.nbytes)
        offsets = rows[:, REMOTE]
        found = np.searchsorted(self.starts, offsets, side="right") - 1
        inside = offsets + rows[:, LENGTH] <= self.ends[found]
        if not bool((inside & (found >= 0)).all()):
            raise InvalidRequest(f"outside the ranges of window {self.window_id}")

    def close(self) -> None:
        with self._changed:
            self._native.window_close(ctypes.byref(self._state))
        for lease in list(self.leases):
            lease.end()
        with self._changed:
            if self._wait_idle(time.monotonic() + _REVOKE_AFTER_S):
                return
            holds = list(self._holds)
        for hold in holds:
            hold.revoke()
        with self._changed:
            self._wait_idle(math.inf)

    def close_if_idle(self) -> bool:
        with self._changed:
            idle = not self._holds and all(lease.end_if_idle() for lease in list(self.leases))
            return idle and bool(self._native.window_close_if_idle(ctypes.byref(self._state)))

    def _wait_idle(self, until: float) -> bool:
        """Waits until there are no stores and holds. Returns False at `until`. The lock is held."""
        while self._holds or self._state.value % _CLOSED:
            if time.monotonic() >= until:
                return False
            self._changed.wait(_POLL_S)
        return True

    def hold(self, revoke: Callable[[], None]) -> WindowHold:
        """Registers a hold. Raises StaleLease if the window is closed. `revoke` may be called after closing and must
        lead to `release`."""
        hold = WindowHold(self, revoke)
        with self._changed:
            if self._state.value >= _CLOSED:
                raise stale(self.window_id)
            self._holds.add(hold)
        return hold

    def begin_lease(self, lease: WriteLease, page: int) -> None:
        with self._changed:
            if self._state.value >= _CLOSED:
                raise stale(self.window_id)
            if not self._native.lease_begin(page, self.window_id, *self.native[1:]):
                raise InvalidRequest("the window has too many ranges for a lease")
            self.leases.add(lease)

    def release_hold(self, hold: WindowHold) -> None:
        with self._changed:
            self._holds.discard(hold)
            self._changed.notify_all()

    def __enter__(self) -> None:
        if not self._native.window_enter(ctypes.byref(self._state)):
            raise stale(self.window_id)

    def __exit__(self, *_: object) -> None:
        self._native.window_leave(ctypes.byref(self._state))


class WindowTable:
    """All open windows of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[int, Window] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._windows)

    def open(self, segment: Segment, ranges: Sequence[tuple[int, int]]) -> int:
        """Opens a window and returns its id. Raises InvalidRequest for ranges that are empty, overlap or leave the
        segment."""
        _check_ranges(segment, ranges)
        with self._lock:
            window_id = self._next_id
            self._next_id += 1
            self._windows[window_id] = Window(window_id, segment, ranges)
        return window_id

    def close(self, window_id: int) -> Segment | None:
        """Closes a window and returns its segment, or None if it was already closed."""
        with self._lock:
            window = self._windows.pop(window_id, None)
        if window is None:
            return None
        window.close()
        return window.segment

    def close_if_idle(self, window_id: int) -> Segment | None:
        """Closes a window without waiting. Returns None if it was already closed or is in use and stays open."""
        window = self._windows.get(window_id)
        if window is None or not window.close_if_idle():
            return None
        return self.close(window_id)

    def close_all(self) -> None:
        for window_id in list(self._windows):
            self.close(window_id)

    def find(self, window_id: int, segment_id: int) -> Window:
        """Returns an open window on the segment. Raises StaleLease if it is closed, InvalidRequest if it never existed
        or is on another segment."""
        window = self._windows.get(window_id)
        if window is None:
            if 0 < window_id < self._next_id:
                raise stale(window_id)
            raise InvalidRequest(f"window {window_id} was never opened")
        if window.segment.segment_id != segment_id:
            raise InvalidRequest(f"window {window_id} is not on segment {segment_id}")
        return window


def stale(window_id: int) -> StaleLease:
    return StaleLease(f"window {window_id} is closed")


def _check_ranges(segment: Segment, ranges: Sequence[tuple[int, int]]) -> None:
    if not ranges:
        raise InvalidRequest("a window without ranges", param="ranges")
    end = 0
    for offset, length in sorted(ranges):
        if length <= 0 or offset < end or offset + length > segment.nbytes:
            raise InvalidRequest(f"bad range ({offset}, {length}) in {segment}", param="ranges")
        end = offset + length
