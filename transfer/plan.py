"""Plans a batch: groups transfers by peer and cuts them into slices that know their transfers. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from protocol.errors import InvalidRequest, MoonserveError
from transfer import scatter
from transfer.base import Op, ScatterTransfer, Slice, Transfer
from transfer.paths.chooser import Path
from transfer.scatter import LENGTH, LIMIT, LOCAL, REMOTE, Rows
from transfer.segments import Segment

if TYPE_CHECKING:
    from transfer.batch import Job

MAX_ROWS = 4096
"""Rows per frame. Bounds what a peer can make the other side hold to 96 KiB of rows per frame."""

AnyTransfer = Transfer | ScatterTransfer


def by_address(transfers: Sequence[AnyTransfer]) -> dict[str, list[int]]:
    """Returns the indices of the transfers of each peer address."""
    parts: dict[str, list[int]] = {}
    for index, transfer in enumerate(transfers):
        address = transfer.remote.address
        if address in parts:
            parts[address].append(index)
        else:
            parts[address] = [index]
    return parts


@dataclass(slots=True, eq=False)
class _Flow:
    """Transfers that may share a slice because op, segments and window are equal."""

    op: Op
    local: Segment
    segment_id: int
    window_id: int | None
    runs: list[int] = field(default_factory=list)
    """Flat triples of remote offset, local offset and length. Adjacent runs are joined and none is empty."""
    remote_end: int = -1
    """Remote end of the last run. A transfer that begins here and at `local_end` is joined to that run."""
    local_end: int = -1
    arrays: list[Rows] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each transfer, parallel to `indices`."""


@dataclass(slots=True, eq=False, kw_only=True)
class Part(Slice):
    """A slice and the state of its attempts."""

    indices: Sequence[int]
    """Positions in the batch of the transfers whose bytes it carries."""
    job: Job = field(init=False)
    tried: list[Path] = field(default_factory=list)
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


def plan(
    transfers: Sequence[AnyTransfer],
    indices: Sequence[int],
    *,
    slice_bytes: int,
    deadline_at: float,
) -> Planned:
    """Cuts one peer's transfers into few slices of at most `slice_bytes` and `MAX_ROWS` runs, joining adjacent runs."""
    if len(indices) == 1 and (alone := _alone(transfers, indices, slice_bytes, deadline_at)):
        return alone
    planned = Planned()
    flows: dict[tuple[Op, int, int, int | None], _Flow] = {}
    for index in indices:
        # This loop runs once per piece of KV, so its common path calls no function.
        transfer = transfers[index]
        segment, remote = transfer.local, transfer.remote.segment_id
        key = (transfer.op, segment.segment_id, remote, transfer.window_id)
        flow = flows.get(key)
        if flow is None:
            if not _has_sound_ids(transfer):
                planned.errors[index] = InvalidRequest("no such segment or window can be")
                continue
            flow = flows[key] = _Flow(transfer.op, segment, remote, transfer.window_id)
        if type(transfer) is Transfer:
            local, length = transfer.local_offset, transfer.length
            start = transfer.remote_offset
            if local < 0 or length < 0 or local + length > segment.nbytes or not 0 <= start < LIMIT:
                planned.errors[index] = _out_of_bounds(transfer)
                continue
            if length:
                if start == flow.remote_end and local == flow.local_end:
                    flow.runs[-1] += length
                else:
                    flow.runs += (start, local, length)
                flow.remote_end, flow.local_end = start + length, local + length
            flow.sizes.append(length)
        elif not _add_array(flow, transfer, index, planned):
            continue
        flow.indices.append(index)
    for flow in flows.values():
        _cut(flow, planned, slice_bytes, deadline_at)
    return planned


def _alone(
    transfers: Sequence[AnyTransfer], indices: Sequence[int], slice_bytes: int, deadline_at: float
) -> Planned | None:
    """Plans a single small run without array arithmetic. Returns None for any other case."""
    transfer = transfers[indices[0]]
    if type(transfer) is not Transfer or not 0 < transfer.length <= slice_bytes:
        return None
    local, remote, length = transfer.local_offset, transfer.remote_offset, transfer.length
    if local < 0 or local + length > transfer.local.nbytes or not 0 <= remote < LIMIT:
        return None
    if not _has_sound_ids(transfer):
        return None
    part = Part(
        op=transfer.op,
        local=transfer.local,
        segment_id=transfer.remote.segment_id,
        window_id=transfer.window_id,
        rows=scatter.rows((remote, local, length)),
        nbytes=length,
        deadline_at=deadline_at,
        indices=indices,
    )
    return Planned([part])


def _add_array(flow: _Flow, transfer: Transfer | ScatterTransfer, index: int, planned: Planned) -> bool:
    assert isinstance(transfer, ScatterTransfer)
    try:
        rows = np.ascontiguousarray(transfer.rows, dtype=np.int64)
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise InvalidRequest(f"rows of shape {rows.shape}, not (n, 3)", param="rows")
        scatter.require_inside(rows, LOCAL, transfer.local.nbytes)
        scatter.require_inside(rows, REMOTE, scatter.LIMIT)
    except InvalidRequest as error:
        planned.errors[index] = error
        return False
    except (TypeError, ValueError, OverflowError) as error:
        planned.errors[index] = InvalidRequest(f"unreadable rows: {error}", param="rows")
        return False
    _flush_runs(flow)
    flow.arrays.append(scatter.merge(rows[rows[:, LENGTH] > 0]))
    flow.sizes.append(scatter.total(rows))
    return True


def _has_sound_ids(transfer: AnyTransfer) -> bool:
    """True if the segment and window ids fit into a frame."""
    return 0 <= transfer.remote.segment_id < LIMIT and 0 <= (transfer.window_id or 0) < LIMIT


def _flush_runs(flow: _Flow) -> None:
    if flow.runs:
        flow.arrays.append(np.array(flow.runs, dtype=np.int64).reshape(-1, 3))
        flow.runs, flow.remote_end, flow.local_end = [], -1, -1


def _cut(flow: _Flow, planned: Planned, slice_bytes: int, deadline_at: float) -> None:
    _flush_runs(flow)
    if not flow.arrays:
        return
    rows = flow.arrays[0]
    if len(flow.arrays) > 1:
        rows = scatter.merge(np.concatenate(flow.arrays))
    groups = list(scatter.cut(rows, slice_bytes, MAX_ROWS))
    owners = _Owners(flow, len(groups))
    for group in groups:
        nbytes = scatter.total(group)
        part = Part(
            op=flow.op,
            local=flow.local,
            segment_id=flow.segment_id,
            window_id=flow.window_id,
            rows=group,
            nbytes=nbytes,
            deadline_at=deadline_at,
            indices=owners.next(nbytes),
        )
        planned.parts.append(part)


class _Owners:
    """Maps consecutive slices to the transfers whose bytes they carry. A flow is one stream of bytes, cut in order."""

    def __init__(self, flow: _Flow, num_slices: int) -> None:
        self._indices = flow.indices
        is_shared = num_slices > 1 and len(flow.sizes) > 1
        self._ends = list(accumulate(flow.sizes)) if is_shared else None
        self._done = 0

    def next(self, nbytes: int) -> Sequence[int]:
        if self._ends is None:
            return self._indices
        first = bisect_right(self._ends, self._done)
        self._done += nbytes
        last = bisect_left(self._ends, self._done)
        return self._indices[first : last + 1]


def _out_of_bounds(transfer: Transfer) -> InvalidRequest:
    return InvalidRequest(
        f"out of bounds: {transfer.length} bytes at {transfer.local_offset} of {transfer.local}, "
        f"at {transfer.remote_offset} of the remote segment"
    )
