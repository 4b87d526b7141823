"""Copying between a peer's memory and ours: in steps, verified, by several threads when it is much.

Its rule: with checksums on, every step is read again on both sides after it was copied and compared, which
costs less than a checksum of each side and misses nothing; bytes that changed meanwhile, or were copied
wrong, are an IntegrityError and never a success. Knows no requests.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from protocol.errors import IntegrityError
from transfer import scatter
from transfer.plan import MAX_ROWS
from transfer.scatter import Rows
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
        self._num_helpers = threads - 1
        self._pool = ThreadPoolExecutor(threads - 1, "transfer-copy") if threads > 1 else None

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
        if len(rows) == 1 and scatter.total(rows) <= STEP_BYTES:
            with guard:
                copy_step(source, into, rows, to_column, verified)
            source.require_live()
            return
        left = deque(scatter.cut(rows, STEP_BYTES, MAX_ROWS))

        def work() -> None:
            while left:
                try:
                    step = left.popleft()
                except IndexError:  # a helper was quicker
                    return
                with guard:
                    copy_step(source, into, step, to_column, verified)

        if self._pool is not None and scatter.total(rows) >= _SHARED_BYTES:
            self._share(self._pool, work, left)
        else:
            work()
        source.require_live()

    def _share(self, pool: ThreadPoolExecutor, work: Callable[[], None], left: deque[Rows]) -> None:
        """On return nothing is stored any more, and what the pool has not begun finds nothing left."""
        helpers: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # no more threads for this process, or closed
                helpers += (pool.submit(work) for _ in range(self._num_helpers))
            work()
        finally:
            left.clear()
            begun = [helper for helper in helpers if not helper.cancel()]
            errors = [error for helper in begun if (error := helper.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """On return its threads have ended."""
        if self._pool is not None:
            self._pool.shutdown()


def copy_step(source: Source, into: Segment, rows: Rows, to_column: int, verified: bool) -> None:
    """In this thread; the caller asks afterwards whether the source is still live."""
    if not verified:
        source.copy(into.base, rows, to_column=to_column)
    elif not source.copy_verified(into.base, rows, to_column=to_column):
        raise IntegrityError("bytes changed while they were copied within the host")
