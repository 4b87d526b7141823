"""Predicts how long a prompt waits in an instance's queue: the rest of the running prompt and all prompts before it.

Prompts run one at a time, lowest placement time + rank first. They run in steps: a later prompt with a lower place
overtakes the running one at the end of its current step. The queue is notified of arrivals and ends only. It assumes
that a prompt begins when the previous one ends, and that a prompt that overtook another ran uninterrupted until its
end. Pure; does not know where predictions come from.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from moonserve.conductor.events import Load
from moonserve.conductor.prediction.c_bindings import QueueRecord
from moonserve.conductor.prediction.instance_table import PrefillTable, RowRef
from moonserve.protocol.request import RequestId
from moonserve.protocol.step_time import PrefillProfile

# Covers the gateway hop, submission and the worker's own bookkeeping, with a margin for a busy machine.
VISIBLE_AFTER_S = 0.5

QueuePosition = tuple[float, int]  # placement time + rank in seconds, then order of arrival


class OrderedSums:
    """Ordered durations with prefix sums: the sum before any place and the number of entries after it.

    All places are distinct. Sums are added from the first place and never subtracted, so rounding errors do not
    accumulate. Only sums behind the last change are computed again, on the next query. A change at the end, the usual
    case, is O(log n); elsewhere it moves and adds the entries behind it, at worst 25 µs for a thousand entries. A tree
    was slower for the usual few dozen.
    """

    __slots__ = ("_numbers", "_ranks", "_seconds", "_sums")

    def __init__(self) -> None:
        self._ranks = array("d")
        self._numbers = array("q")
        self._seconds = array("d")
        self._sums = array("d", [0.0])  # before each place and at the end; the tail may be missing

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def total(self) -> float:
        return self._known()[-1]

    def add(self, place: QueuePosition, seconds: float) -> None:
        at = self._find(place)
        self._ranks.insert(at, place[0])
        self._numbers.insert(at, place[1])
        self._seconds.insert(at, seconds)
        del self._sums[at + 1 :]

    def remove(self, place: QueuePosition) -> None:
        """Removes the entry at `place`, which must exist."""
        at = self._find(place)
        assert (self._ranks[at], self._numbers[at]) == place, "nothing is there"
        del self._ranks[at], self._numbers[at], self._seconds[at], self._sums[at + 1 :]

    def around(self, place: QueuePosition) -> tuple[float, int]:
        """Returns the seconds of all entries at lower places and the number at higher ones; `place` is not taken."""
        at = self._find(place)
        return self._known()[at], len(self._ranks) - at

    def first(self) -> QueuePosition | None:
        """Returns the lowest place, or None if empty."""
        return (self._ranks[0], self._numbers[0]) if self._ranks else None

    def places(self) -> Iterator[QueuePosition]:
        """Iterates over all places, lowest first."""
        return zip(self._ranks, self._numbers, strict=True)

    def columns(self) -> tuple[int, int, int]:
        """Returns the address of the places' times, the address of the prefix sums (with the total last) and the number
        of entries. Valid until the next change."""
        sums = self._known()
        return self._ranks.buffer_info()[0], sums.buffer_info()[0], len(self._ranks)

    def _find(self, place: QueuePosition) -> int:
        """Returns the index of a place, or the index at which to insert it."""
        rank, number = place
        low = bisect_left(self._ranks, rank)
        high = bisect_right(self._ranks, rank, low)
        return low if low == high else bisect_left(self._numbers, number, low, high)

    def _known(self) -> array[float]:
        """Returns all sums, after computing the missing ones."""
        sums = self._sums
        known = len(sums) - 1
        if known < len(self._seconds):
            sums.extend(accumulate(self._seconds[known:], initial=sums.pop()))
        return sums

    def validate(self) -> None:
        places = list(self.places())
        assert places == sorted(set(places))
        assert len(self._seconds) == len(places)
        assert self._known().tolist() == [0.0, *accumulate(self._seconds)]


@dataclass(frozen=True, slots=True)
class _Job:
    """A placed prompt that is not known to be prefilled."""

    request_id: RequestId
    place: QueuePosition
    seconds: float  # predicted
    tokens: int  # uncached
    placed_at: float


class PrefillQueue:
    """Predicted prefill work of one instance, in the order of placement time + rank. Cost of a change: `OrderedSums`.

    A rank is in seconds: a prompt of rank 0 that is placed within this time after the prompt still runs before it. A
    placement is *settled* after `VISIBLE_AFTER_S`: by then the instance has received it, so a heartbeat without it
    means that it is done. The sums are written to the instance's row (`conductor.prediction.instance_table`) whenever
    they change.
    """

    def __init__(self, row_ref: RowRef[PrefillTable], step_s: float = math.inf) -> None:
        """`step_s`: longest wait of an overtaking prompt for the running one; infinite = running prompts are never
        overtaken."""
        self._row_ref = row_ref
        self._step_s = step_s
        self._jobs: dict[RequestId, _Job] = {}
        self._by_number: dict[int, _Job] = {}
        self._waiting = OrderedSums()
        self._num_arrived = 0
        self._running: _Job | None = None
        self._began_at = 0.0
        self._total_tokens = 0
        self._foreign_work_s = 0.0  # work the instance reports beyond what was placed by this conductor
        self._record = QueueRecord()  # as of the last call of `native_record`
        self._record_at = ctypes.addressof(self._record)
        self._is_recorded = False  # `_record` is up to date

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._jobs

    def add(self, request_id: RequestId, seconds: float, tokens: int, now: float, rank: float = 0.0) -> None:
        """Adds a new prompt, behind earlier ones at the same place; `seconds` is its predicted run time."""
        self._num_arrived += 1
        job = _Job(request_id, (now + rank, self._num_arrived), seconds, tokens, now)
        self._jobs[request_id] = self._by_number[self._num_arrived] = job
        if self._running is None:  # so the queue is empty
            self._running, self._began_at = job, now
        else:
            self._waiting.add(job.place, seconds)
        self._total_tokens += tokens
        self._write_row()

    def remove(self, request_id: RequestId, now: float) -> None:
        """Removes a prompt that is prefilled or given up. Unknown ids are ignored, since a heartbeat may have removed
        it first. A prompt that was predicted to be still waiting is taken to have run already."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        del self._by_number[job.place[1]]
        if job is self._running:
            self._begin_next(now)
        else:
            self._waiting.remove(job.place)
            if self._interrupts(job.place):
                self._began_at = min(self._began_at + job.seconds, now)
        self._total_tokens -= job.tokens
        self._write_row()

    def estimate_s(self, now: float) -> float:
        """Returns the seconds until all queued work has run."""
        return self._left_s(now) + self._waiting.total + self._foreign_work_s

    @property
    def placed_s(self) -> float:
        """Predicted seconds of all placed prompts, as if none of them had begun."""
        return self._waiting.total + self._running_s

    def wait_for(self, now: float, rank: float) -> tuple[float, int]:
        """Returns the seconds until a prompt placed now with this rank would begin, and the number of prompts, the
        running one included, that it would overtake. Work placed by other conductors runs before it."""
        place = (now + rank, self._num_arrived + 1)
        wait_s, num_delayed = self._waiting.around(place)
        left_s = self._left_s(now)
        if left_s > self._step_s and self._interrupts(place):
            left_s, num_delayed = self._step_s, num_delayed + 1
        return left_s + wait_s + self._foreign_work_s, num_delayed

    def native_record(self) -> int:
        """Returns the address of the `QueueRecord` with all that `wait_for` needs; valid until the next change."""
        if not self._is_recorded:
            self._write_record()
        return self._record_at

    def correct(self, load: Load, profile: PrefillProfile, now: float) -> list[RequestId]:
        """Adopts the queued tokens that the instance reports. Removes and returns the settled prompts that must
        be prefilled already because more was queued here than it reports."""
        settled = [job for job in self._in_order() if job.placed_at + VISIBLE_AFTER_S <= now]
        tokens_left = sum(job.tokens for job in settled)
        gone: list[RequestId] = []
        for job in settled:
            tokens_left -= job.tokens
            if tokens_left < load.queued_tokens:
                break
            self.remove(job.request_id, now)
            gone.append(job.request_id)
        # An instance counts waiting prompts as uncached until it has looked them up. So surplus tokens belong to other
        # conductors' placements only if there are also more prompts than were placed here.
        is_shared = load.num_waiting + load.num_running > len(self._jobs)
        surplus = load.queued_tokens - self._total_tokens if is_shared else 0
        self._foreign_work_s = profile.c0 + profile.c1 * surplus if surplus > 0 else 0.0
        self._write_row()
        return gone

    def _write_record(self) -> None:
        record = self._record
        record.places, record.sums, record.count = self._waiting.columns()
        record.is_running, record.began_at = self._running is not None, self._began_at
        record.step_s, record.surplus_s = self._step_s, self._foreign_work_s
        record.running_s = self._running_s
        if self._running is not None:
            record.running_place = self._running.place[0]
        self._is_recorded = True

    def _in_order(self) -> list[_Job]:
        """Returns all jobs in the order in which they will run. O(n)."""
        waiting = [self._by_number[number] for _, number in self._waiting.places()]
        return waiting if self._running is None else [self._running, *waiting]

    @property
    def _running_s(self) -> float:
        return 0.0 if self._running is None else self._running.seconds

    def _left_s(self, now: float) -> float:
        """Returns the remaining seconds of the running prompt; 0 if it is overdue, since nothing more is known."""
        return max(self._running_s - max(now - self._began_at, 0.0), 0.0)

    def _interrupts(self, place: QueuePosition) -> bool:
        """Returns True if a prompt at this place overtakes the running one."""
        if self._running is None or math.isinf(self._step_s):
            return False
        return place < self._running.place

    def _begin_next(self, now: float) -> None:
        place = self._waiting.first()
        if place is None:
            self._running = None
            return
        self._waiting.remove(place)
        self._running, self._began_at = self._by_number[place[1]], now

    def _row_values(self) -> tuple[float, float, float, float]:
        return self._waiting.total, self._running_s, self._began_at, self._foreign_work_s

    def _write_row(self) -> None:
        self._is_recorded = False
        table, row = self._row_ref.table, self._row_ref.row
        waiting_s, running_s, began_at, surplus_s = self._row_values()
        table.waiting_s[row], table.running_s[row] = waiting_s, running_s
        table.began_at[row], table.surplus_s[row] = began_at, surplus_s

    def validate(self) -> None:
        table, row = self._row_ref.table, self._row_ref.row
        columns = (table.waiting_s, table.running_s, table.began_at, table.surplus_s)
        assert tuple(column[row] for column in columns) == self._row_values(), "the row is stale"
        self._waiting.validate()
        assert {job.place[1]: job for job in self._jobs.values()} == self._by_number
        assert {job.request_id for job in self._in_order()} == self._jobs.keys()
        assert len(self._waiting) == len(self._jobs) - (self._running is not None)
        assert (self._running is None) == (not self._jobs)
        assert self._total_tokens == sum(job.tokens for job in self._jobs.values())
        assert self._foreign_work_s >= 0.0
