"""Copying between a peer's memory and ours: in steps, verified, by several threads when it is much.

Its rule: with checksums on, every step is read again on both sides after it was copied and compared, which
costs less than a checksum of each side and misses nothing; bytes that changed meanwhile, or were copied
wrong, are an IntegrityError and never a success. Knows no requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from protocol.errors import IntegrityError, PeerLost
from transfer import scatter
from transfer.plan import MAX_ROWS
from transfer.rows import Rows
from transfer.segments import Segment

STEP_BYTES = 4 << 20
"""Under way for less than a millisecond, the longest that close_window waits."""
_SHARED_BYTES = 8 << 20
"""From here on a copy is shared among threads; below, waking them costs more than they save."""

_unguarded: AbstractContextManager[None] = contextlib.nullcontext()


class Source(Protocol):
    """A peer's memory, as far as we may read it."""

    nbytes: int

    def copy(self, to: int, rows: Rows, *, to_column: int) -> None:
        """Raises PeerLost or InvalidRequest when it cannot be read any more."""

    def copy_verified(self, to: int, rows: Rows, *, to_column: int) -> bool:
        """Both sides are read again; False when they differ then."""

    def require_live(self) -> None:
        """After copying: raises InvalidRequest when the owner has deregistered it meanwhile."""

    @property
    def live(self) -> bool: ...
    def close(self) -> None: ...


class Copier:
    """Thread-safe. Holds threads once it has copied much; `close` ends them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def copy(
        self,
        source: Source,
        into: Segment,
        rows: Rows,
        *,
        to_column: int,
        verified: bool,
        guard: AbstractContextManager[None] = _unguarded,
    ) -> None:
        """Each step's stores happen inside `guard`, which may refuse. Bounds have been checked."""

        def perform(steps: Sequence[Rows]) -> None:
            for step in steps:
                with guard:
                    copy_step(source, into, step, to_column, verified)

        steps = list(scatter.cut(rows, STEP_BYTES, MAX_ROWS))
        if self._threads > 1 and scatter.total(rows) >= _SHARED_BYTES:
            own, *offered = [steps[first :: self._threads] for first in range(self._threads)]
            others: list[Future[None]] = []
            try:
                others += (self._offer(perform, share) for share in offered)
                perform(own)
                for share, other in zip(offered, others, strict=True):
                    if other.cancel():  # no thread has come to it
                        perform(share)
            finally:
                _join(others)
        else:
            perform(steps)
        source.require_live()

    def close(self) -> None:
        """On return its threads have ended; what was being copied has been."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _offer(self, perform: _Perform, share: Sequence[Rows]) -> Future[None]:
        """Of a thread that may come to it. The pool's own future would be lost where no thread can be had, and the
        share, which it keeps all the same, be copied at some later time."""
        offer: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, "transfer-copy")
            with contextlib.suppress(RuntimeError):  # the process may not have more threads
                self._pool.submit(_take, offer, perform, share)
        return offer


class _Perform(Protocol):
    def __call__(self, steps: Sequence[Rows], /) -> None: ...


def copy_step(source: Source, into: Segment, rows: Rows, to_column: int, verified: bool) -> None:
    """In this thread; the caller asks afterwards whether the source is still live."""
    if not verified:
        source.copy(into.base, rows, to_column=to_column)
    elif not source.copy_verified(into.base, rows, to_column=to_column):
        raise IntegrityError("bytes changed while they were copied within the host")


def _take(offer: Future[None], perform: _Perform, share: Sequence[Rows]) -> None:
    if not offer.set_running_or_notify_cancel():
        return
    try:
        perform(share)
    except BaseException as error:  # raised where it is joined
        offer.set_exception(error)
    else:
        offer.set_result(None)


def _join(others: Sequence[Future[None]]) -> None:
    """Waits for all that have begun, so that nothing is stored later; raises what the first of them raised."""
    begun = [other for other in others if not other.cancel()]
    errors = [error for other in begun if (error := other.exception()) is not None]
    if errors:
        raise errors[0]
