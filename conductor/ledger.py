"""What the conductor expects each instance to be busy with: its own placements, corrected by what instances report.

`PrefillQueue` is one prefill instance's predicted work, `DecodeBook` one decode instance's sequences, `PendingReads`
what is yet to be read from a store. A placement is
*settled* after SETTLE_S: by then the instance has heard of it, and a heartbeat without it means that it is done.
Each book shows its sums in its instance's row (`conductor.columns`) whenever they change. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from conductor.columns import PrefillTable, Seat, StoreTable
from conductor.cost.queue import WorkQueue
from conductor.events import Load
from conductor.native.prefills import QueueRecord
from protocol.ids import RequestId
from protocol.profile import PrefillProfile

# Gateway hop, submission and the worker's own bookkeeping, with room for a busy machine.
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Job:
    """One placed prompt that is not known to be prefilled."""

    placed_at: float
    tokens: int  # uncached


class PrefillQueue:
    """Predicted prefill work of one instance, in the order of placement time + rank.

    A rank is in seconds: how long prompts may be placed after this one and still go before it, if theirs is 0.
    """

    def __init__(self, seat: Seat[PrefillTable], step_s: float = math.inf) -> None:
        """`step_s`: how long one that goes before the rest of what runs waits for it, at most; infinite: no prompt
        does."""
        self._seat = seat
        self._jobs: dict[RequestId, _Job] = {}
        self._work: WorkQueue[RequestId] = WorkQueue(step_s)
        self._total_tokens = 0
        self._record = QueueRecord()  # of `_work`, as it was when somebody last asked
        self._is_recorded = False  # and still is
        self._surplus_s = 0.0  # work the instance reports beyond what was placed by this conductor

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._jobs

    def add(
        self, request_id: RequestId, seconds: float, tokens: int, now: float, rank: float = 0.0
    ) -> None:
        """A prompt that is not here is placed, and predicted to run for `seconds`."""
        self._jobs[request_id] = _Job(now, tokens)
        self._work.add(request_id, seconds, now, now + rank)
        self._total_tokens += tokens
        self._show()

    def remove(self, request_id: RequestId, now: float) -> None:
        """The prompt is prefilled, or given up. Unknown ids are ignored: a heartbeat may have told it first."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        self._work.remove(request_id, now)
        self._total_tokens -= job.tokens
        self._show()

    def estimate_s(self, now: float) -> float:
        """Seconds until all that is there has run."""
        return self._work.total_s(now) + self._surplus_s

    @property
    def placed_s(self) -> float:
        """Predicted of all that was placed, as if none of it had begun."""
        return self._work.waiting_s + self._work.running_s

    def wait_s(self, now: float, rank: float) -> float:
        """Seconds until a prompt placed now with this rank would begin to run. What others placed goes before it."""
        return self._work.wait_s(now, now + rank) + self._surplus_s

    def look(self, now: float, rank: float) -> tuple[float, int]:
        """`wait_s`, and how many prompts one placed now with this rank goes before."""
        wait_s, num_delayed = self._work.look(now, now + rank)
        return wait_s + self._surplus_s, num_delayed

    def record(self) -> QueueRecord:
        """The same as numbers, until the next change."""
        if not self._is_recorded:
            self._work.fill(self._record)
            self._record.surplus_s = self._surplus_s
            self._is_recorded = True
        return self._record

    def correct(self, load: Load, profile: PrefillProfile, now: float) -> list[RequestId]:
        """Takes over what the instance says that it has left: settled prompts beyond it are prefilled already, and
        returned."""
        gone: list[RequestId] = []
        in_order = ((r, self._jobs[r]) for r in self._work.in_order())
        settled = {r: job for r, job in in_order if job.placed_at + SETTLE_S <= now}
        tokens_left = sum(job.tokens for job in settled.values())
        for request_id, job in settled.items():
            tokens_left -= job.tokens
            if tokens_left < load.queued_tokens:
                break
            self.remove(request_id, now)
            gone.append(request_id)
        # An instance counts what waits as uncached until it has looked, so that more tokens than were placed are
        # others' only where there are more prompts too.
        is_shared = load.num_waiting + load.num_running > len(self._jobs)
        surplus = load.queued_tokens - self._total_tokens if is_shared else 0
        self._surplus_s = profile.c0 + profile.c1 * surplus if surplus > 0 else 0.0
        self._show()
        return gone

    def _shown(self) -> tuple[float, float, float, float]:
        work = self._work
        return work.waiting_s, work.running_s, work.began_at, self._surplus_s

    def _show(self) -> None:
        self._is_recorded = False
        table, row = self._seat.table, self._seat.row
        waiting_s, running_s, began_at, surplus_s = self._shown()
        table.waiting_s[row], table.running_s[row] = waiting_s, running_s
        table.began_at[row], table.surplus_s[row] = began_at, surplus_s

    def validate(self) -> None:
        table, row = self._seat.table, self._seat.row
        columns = (table.waiting_s, table.running_s, table.began_at, table.surplus_s)
        assert tuple(column[row] for column in columns) == self._shown(), "the row is stale"
        self._work.validate()
        assert set(self._work.in_order()) == self._jobs.keys(), "a prompt without its work"
        assert self._total_tokens == sum(j.tokens for j in self._jobs.values())
        assert self._surplus_s >= 0.0


class PendingReads:
    """Blocks that placed prompts have yet to read from one store."""

    def __init__(self, seat: Seat[StoreTable]) -> None:
        self._seat = seat
        self.num_blocks = 0

    def add(self, num_blocks: int) -> None:
        self._change(num_blocks)

    def remove(self, num_blocks: int) -> None:
        self._change(-num_blocks)

    def _change(self, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        self._seat.table.pending_reads[self._seat.row] = self.num_blocks

    def validate(self) -> None:
        assert self.num_blocks >= 0, "a read was taken out twice"
        assert self._seat.table.pending_reads[self._seat.row] == self.num_blocks, "the row is stale"
