"""Copies from a peer's memory into a local segment: in steps, verified, and by several threads if it is large.

Its rule: with checksums on, both sides of every step are read again after the copy and compared. That costs less than a
checksum of each side and misses nothing. Bytes that changed meanwhile or were copied wrong are an IntegrityError, never
a success. Knows no requests.
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
"""A copy of this size takes less than a millisecond, the longest that close_window waits."""
_SHARED_BYTES = 8 << 20
"""Size from which a copy is shared among threads. Below it, waking them costs more than they save."""

_unguarded: AbstractContextManager[None] = contextlib.nullcontext()


class Source(Protocol):
    """Readable memory of a peer."""

    nbytes: int

    def copy(self, to: int, rows: Rows, *, to_column: int) -> None:
        """Copies rows out of the memory. Raises PeerLost or InvalidRequest if it cannot be read any more."""

    def copy_verified(self, to: int, rows: Rows, *, to_column: int) -> bool:
        """Copies rows and reads both sides again. Returns False if they differ then."""

    def require_live(self) -> None:
        """Checks, after copying, that the owner has not deregistered the memory. Raises InvalidRequest if it has."""

    @property
    def live(self) -> bool: ...
    def close(self) -> None: ...


class Copier:
    """Copies rows, sharing large copies among threads, which `close` ends. Thread-safe."""

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
        """Copies rows whose bounds were checked. Each step's stores happen inside `guard`, which may refuse them."""
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
                except IndexError:  # another thread took the last step
                    return
                with guard:
                    copy_step(source, into, step, to_column, verified)

        if self._pool is not None and scatter.total(rows) >= _SHARED_BYTES:
            self._share(self._pool, work, left)
        else:
            work()
        source.require_live()

    def _share(self, pool: ThreadPoolExecutor, work: Callable[[], None], left: deque[Rows]) -> None:
        """Shares `work` with the pool. On return nothing is stored any more; helpers that start later find no steps."""
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
        """Ends the threads and waits for them."""
        if self._pool is not None:
            self._pool.shutdown()


def copy_step(source: Source, into: Segment, rows: Rows, to_column: int, verified: bool) -> None:
    """Copies one step in this thread. The caller then checks that the source is still live."""
    if not verified:
        source.copy(into.base, rows, to_column=to_column)
    elif not source.copy_verified(into.base, rows, to_column=to_column):
        raise IntegrityError("bytes changed while they were copied within the host")
