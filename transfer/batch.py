"""A submitted batch: how it is cut into slices (`plan_slices`, pure), and its outcome, for threads and for asyncio.

An outcome is final: once `done`, no byte of the batch moves and no error changes. A batch has one job per peer and is
notified once per job, when no part of the job moves any more. Knows no sessions.
"""

import asyncio
import logging
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from moonserve.protocol.errors import Cancelled, DeadlineExceeded, InvalidRequest, MoonserveError, PeerLost
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import data_plane
from moonserve.transfer.memory.scatter import LIMIT, LOCAL, MAX_ROWS, REMOTE, Rows
from moonserve.transfer.paths.path_selection import TransferPath
from moonserve.transfer.transport_interface import Op, ScatterTransfer, Slice, Transfer

_log = logging.getLogger(__name__)

AnyTransfer = Transfer | ScatterTransfer
_pack_row = struct.Struct("@3q").pack


def group_by_peer(transfers: Sequence[AnyTransfer]) -> dict[str, list[int]]:
    """Returns the indices of the transfers of each peer address."""
    parts: dict[str, list[int]] = {}
    for index, transfer in enumerate(transfers):
        parts.setdefault(transfer.remote.address, []).append(index)
    return parts


@dataclass(slots=True, eq=False, kw_only=True)
class Part(Slice):
    """A slice and the state of its attempts."""

    indices: Sequence[int]
    """Positions in the batch of the transfers whose bytes it carries."""
    job: "Job" = field(init=False)
    tried: list[TransferPath] = field(default_factory=list)
    """Paths on which it failed in the current round."""
    rounds: int = 0
    """Number of completed rounds over all paths."""
    num_corrupt: int = 0
    fences: list[int] = field(default_factory=list)
    """Ids of the target's connections that may still be storing it. They are ended before it is sent again."""
    has_alternative: bool = False
    """True if another path can be tried after the current attempt."""
    taken_at: float = 0.0
    give_up_at: float = 0.0
    """End of the current attempt, in monotonic seconds."""


@dataclass(slots=True, eq=False)
class Planned:
    """Result of planning: parts in order, and errors of invalid transfers by index."""

    parts: list[Part] = field(default_factory=list)
    errors: dict[int, MoonserveError] = field(default_factory=dict)


def plan_slices(
    transfers: Sequence[AnyTransfer],
    indices: Sequence[int],
    *,
    slice_bytes: int,
    deadline_at: float,
) -> Planned:
    """Cuts one peer's transfers into few slices of at most `slice_bytes` and `MAX_ROWS` runs, joining adjacent runs."""
    planned = Planned()
    if found := _one_flow([transfers[index] for index in indices]):
        _cut(transfers, indices, found[0], planned, slice_bytes, deadline_at)
        return planned
    flows: dict[tuple[Op, int, int, int | None], list[int]] = {}
    for index in indices:
        transfer = transfers[index]
        if (error := _error_of(transfer)) is not None:
            planned.errors[index] = error
            continue
        key = (transfer.op, transfer.local.segment_id, transfer.remote.segment_id, transfer.window_id)
        flows.setdefault(key, []).append(index)
    for flow in flows.values():
        rows = data_plane().joined(_rows_of(transfers[index] for index in flow))
        _cut(transfers, flow, rows, planned, slice_bytes, deadline_at)
    return planned


def plan_single(transfers: Sequence[AnyTransfer], slice_bytes: int, deadline_at: float) -> Slice | None:
    """Plans transfers that fit into one slice together: runs with the same op, segments and window, or one scatter
    transfer. Returns None for any other case, also for invalid transfers."""
    found = _one_flow(transfers) if len(transfers) <= MAX_ROWS else None
    if found is None or found[1] > slice_bytes or len(found[0]) > MAX_ROWS:
        return None
    first, (rows, nbytes) = transfers[0], found
    return Slice(
        op=first.op,
        local=first.local,
        segment_id=first.remote.segment_id,
        window_id=first.window_id,
        rows=rows,
        nbytes=nbytes,
        deadline_at=deadline_at,
    )


def _one_flow(transfers: Sequence[AnyTransfer]) -> tuple[Rows, int] | None:
    """Returns the joined rows of valid transfers with the same op, segments and window, and their bytes, at least 1."""
    first = transfers[0]
    if not _has_sound_ids(first):
        return None
    op, local, remote, window_id = first.op, first.local, first.remote, first.window_id
    if len(transfers) == 1 and type(first) is Transfer:
        start, to, nbytes = first.remote_offset, first.local_offset, first.length
        if not (0 < nbytes <= local.nbytes - to and to >= 0 and 0 <= start <= LIMIT - nbytes):
            return None
        return np.array(((start, to, nbytes),), np.int64), nbytes
    for transfer in transfers:
        if (
            transfer.op is not op
            or transfer.local is not local
            or (transfer.remote is not remote and transfer.remote != remote)
            or transfer.window_id != window_id
        ):
            return None
    try:
        rows = _rows_of(transfers)
    except (InvalidRequest, OverflowError):
        return None
    count, nbytes = data_plane().join_rows(rows, local.nbytes, LIMIT)
    return (rows[:count], nbytes) if count > 0 else None


def packed(transfer: AnyTransfer) -> bytes | None:
    """Returns the row of a contiguous transfer, without checking it; None if its numbers do not fit."""
    try:
        if type(transfer) is Transfer:
            return _pack_row(transfer.remote_offset, transfer.local_offset, transfer.length)
    except struct.error:
        pass
    return None


def _rows_of(transfers: Iterable[AnyTransfer]) -> Rows:
    """Returns a copy of the transfers' rows, in order. Raises InvalidRequest or OverflowError for unreadable ones."""
    arrays: list[Rows] = []
    runs: list[int] = []
    for transfer in transfers:
        # This loop runs once per piece of KV, so its common path calls no function.
        if type(transfer) is Transfer:
            runs += (transfer.remote_offset, transfer.local_offset, transfer.length)
            continue
        arrays += (np.array(runs, np.int64).reshape(-1, 3), _array_of(transfer))
        runs = []
    arrays.append(np.array(runs, np.int64).reshape(-1, 3))
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _array_of(transfer: Transfer | ScatterTransfer) -> Rows:
    assert isinstance(transfer, ScatterTransfer)
    try:
        rows = np.ascontiguousarray(transfer.rows, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"unreadable rows: {error}", param="rows") from error
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise InvalidRequest(f"rows of shape {rows.shape}, not (n, 3)", param="rows")
    return rows


def _error_of(transfer: AnyTransfer) -> InvalidRequest | None:
    """Returns why a transfer cannot be planned."""
    segment = transfer.local
    if not _has_sound_ids(transfer):
        return InvalidRequest("the segment id or window id is out of range")
    if type(transfer) is Transfer:
        start, to, length = transfer.remote_offset, transfer.local_offset, transfer.length
        if length >= 0 and 0 <= to <= segment.nbytes - length and 0 <= start <= LIMIT - length:
            return None
        return InvalidRequest(f"out of bounds: {length} bytes at {to} of {segment}, at {start} of the remote segment")
    try:
        rows = _array_of(transfer)
        scatter.require_inside(rows, LOCAL, segment.nbytes)
        scatter.require_inside(rows, REMOTE, LIMIT)
    except InvalidRequest as error:
        return error
    return None


def _has_sound_ids(transfer: AnyTransfer) -> bool:
    """True if the segment and window ids fit into a frame."""
    return 0 <= transfer.remote.segment_id < LIMIT and 0 <= (transfer.window_id or 0) < LIMIT


def _cut(
    transfers: Sequence[AnyTransfer],
    flow: Sequence[int],
    rows: Rows,
    planned: Planned,
    slice_bytes: int,
    deadline_at: float,
) -> None:
    """Plans transfers with the same op, segments and window, whose joined rows are given."""
    first = transfers[flow[0]]
    groups = list(scatter.cut(rows, slice_bytes, MAX_ROWS))
    owners = _SliceOwners(transfers, flow, len(groups))
    for group, nbytes in groups:
        part = Part(
            op=first.op,
            local=first.local,
            segment_id=first.remote.segment_id,
            window_id=first.window_id,
            rows=group,
            nbytes=nbytes,
            deadline_at=deadline_at,
            indices=owners.next(nbytes),
        )
        planned.parts.append(part)


class _SliceOwners:
    """Maps consecutive slices to the transfers whose bytes they carry. A flow is one stream of bytes, cut in order."""

    def __init__(self, transfers: Sequence[AnyTransfer], flow: Sequence[int], num_slices: int) -> None:
        self._indices = flow
        is_shared = num_slices > 1 and len(flow) > 1
        self._ends = list(accumulate(_size_of(transfers[index]) for index in flow)) if is_shared else None
        self._done = 0

    def next(self, nbytes: int) -> Sequence[int]:
        if self._ends is None:
            return self._indices
        first = bisect_right(self._ends, self._done)
        self._done += nbytes
        return self._indices[first : bisect_left(self._ends, self._done) + 1]


def _size_of(transfer: AnyTransfer) -> int:
    return transfer.length if type(transfer) is Transfer else scatter.total(_array_of(transfer))


class Batch:
    """Awaitable result of a submission. Raises the first failed transfer's error; `errors` has all of them."""

    __slots__ = ("_callbacks", "_errors", "_gate", "_lock", "_on_done", "_parts_left", "cancelled")

    def __init__(self, num_transfers: int, num_parts: int, on_done: Callable[[], None]) -> None:
        self._errors: list[MoonserveError | None] = [None] * num_transfers
        self._parts_left = num_parts
        self._on_done = on_done
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.cancelled = False
        """True once cancellation was requested. Parts that have not started fail with Cancelled."""
        # A plain lock, released when the batch is done: a quarter of the cost of an Event, on the compute thread.
        self._gate = threading.Lock()
        if num_parts:
            self._gate.acquire()
        else:
            on_done()

    @property
    def done(self) -> bool:
        return not self._parts_left

    @property
    def errors(self) -> tuple[MoonserveError | None, ...]:
        """One entry per transfer, in order; None if it succeeded or has not ended yet."""
        return tuple(self._errors)

    def cancel(self) -> None:
        """Prevents parts that have not started from starting; has no effect on parts that have ended. Parts in flight
        end within a slice's time: the batch's memory may be reused only when `done` is true."""
        self.cancelled = True

    def settle_part(self, errors: Mapping[int, MoonserveError]) -> None:
        """Records that one peer's job has ended. `errors` is keyed by transfer index."""
        with self._lock:
            for index, error in errors.items():
                self._errors[index] = error
            if self._parts_left == 1:
                self._on_done()  # must run before `done` becomes true
                self._on_done = lambda: None  # releases what the callback holds
            self._parts_left -= 1
            if self._parts_left:
                return
        self._gate.release()
        for callback in self._callbacks:
            _call(callback)
        self._callbacks.clear()

    def add_done_callback(self, callback: "Callable[[Batch], None]") -> None:
        """Registers a callback. It runs once, in the thread that ends the batch, or immediately if the batch is done.
        It must not block."""
        with self._lock:
            if self._parts_left:
                self._callbacks.append(lambda: callback(self))
                return
        callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the batch is done and raises the first error. Raises DeadlineExceeded after `timeout_s`."""
        if not self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise DeadlineExceeded(f"batch not done after {timeout_s} s")
        self._gate.release()
        self._raise_first()

    def __await__(self) -> Generator[Any, None, None]:
        """Waits for the batch on the running loop. Cancelling the awaiting task leaves the batch running."""
        if not self.done:
            yield from self._future(asyncio.get_running_loop()).__await__()
        self._raise_first()

    def _future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def from_worker() -> None:
            # A closed loop has no waiting task.
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve)

        with self._lock:
            if self._parts_left:
                self._callbacks.append(from_worker)
                return future
        resolve()
        return future

    def _raise_first(self) -> None:
        for error in self._errors:
            if error is not None:
                raise error


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:  # an error in a callback must not end the transfer thread
        _log.exception("a callback of a transfer batch failed")


class Job:
    """The work of one batch for one peer. Any thread may settle its parts, one by one."""

    __slots__ = ("_batch", "_errors", "_left", "_lock", "deadline_at", "nbytes")

    def __init__(self, planned: Planned, batch: Batch, deadline_at: float) -> None:
        self.deadline_at = deadline_at
        self.nbytes = sum(part.nbytes for part in planned.parts)
        self._batch = batch
        self._errors = planned.errors
        self._lock = threading.Lock()
        for part in planned.parts:
            part.job = self
        self._left = len(planned.parts)
        if not self._left:
            batch.settle_part(self._errors)

    @property
    def cancelled(self) -> bool:
        return self._batch.cancelled

    def end_error(self, overdue: str, peer: str) -> MoonserveError:
        """Returns the error of a part that will not be started: Cancelled, or PeerLost with the message `overdue`."""
        return Cancelled("the batch was cancelled") if self.cancelled else PeerLost(overdue, peer=peer)

    def settle(self, part: Part, error: MoonserveError | None) -> None:
        """Records the final outcome of a part."""
        with self._lock:
            assert self._left > 0, "a part has ended twice"
            if error is not None:
                for index in part.indices:
                    self._errors.setdefault(index, error)
            self._left -= 1
            if self._left:
                return
        self._batch.settle_part(self._errors)
