"""What the conductor expects each instance to be busy with: its own placements, corrected by what instances report.

`PrefillQueue` is one prefill instance's predicted work, `DecodeBook` one decode instance's sequences, `PendingReads`
what is yet to be read from a store. A placement is
*settled* after SETTLE_S: by then the instance has heard of it, and a heartbeat without it means that it is done.
Each book shows its sums in its instance's row (`conductor.columns`) whenever they change. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from conductor.columns import DecodeTable, PrefillTable, Seat, StoreTable
from conductor.cost.queue import WorkQueue
from conductor.endings import Drain, Endings
from conductor.events import Load
from protocol.ids import RequestId
from protocol.profile import PrefillProfile

# What a column holds at most, whatever an instance says about itself; sums of such stay exact.
_MOST = 2**53
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

    def wait_s(self, now: float, rank: float) -> float:
        """Seconds until a prompt placed now with this rank would begin to run. What others placed goes before it."""
        return self._work.wait_s(now, now + rank) + self._surplus_s

    def num_delayed(self, now: float, rank: float) -> int:
        """Prompts that one placed now with this rank goes before."""
        return self._work.num_delayed(now, now + rank)

    def correct(self, load: Load, profile: PrefillProfile, now: float) -> None:
        """Takes over what the instance says that it has left: settled prompts beyond it are prefilled already."""
        in_order = ((r, self._jobs[r]) for r in self._work.in_order())
        settled = {r: job for r, job in in_order if job.placed_at + SETTLE_S <= now}
        tokens_left = sum(job.tokens for job in settled.values())
        for request_id, job in settled.items():
            tokens_left -= job.tokens
            if tokens_left < load.queued_tokens:
                break
            self.remove(request_id, now)
        # An instance counts what waits as uncached until it has looked, so that more tokens than were placed are
        # others' only where there are more prompts too.
        is_shared = load.num_waiting + load.num_running > len(self._jobs)
        surplus = load.queued_tokens - self._total_tokens if is_shared else 0
        self._surplus_s = profile.c0 + profile.c1 * surplus if surplus > 0 else 0.0
        self._show()

    def _shown(self) -> tuple[float, float, float, float]:
        work = self._work
        return work.waiting_s, work.running_s, work.began_at, self._surplus_s

    def _show(self) -> None:
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


@dataclass(slots=True, eq=False)
class _Sequence:
    """One placed request that has not ended."""

    tokens: int
    blocks: int
    slot: int  # of its expected end
    started_at: float | None = None  # its first token was reported


class DecodeBook:
    """Sequences of one decode instance: the last heartbeat, plus what it cannot have counted yet."""

    def __init__(self, num_blocks: int, seat: Seat[DecodeTable]) -> None:
        self._seat = seat
        self._sequences: dict[RequestId, _Sequence] = {}
        self._unseen: dict[RequestId, _Sequence] = {}  # of them, not counted in the last heartbeat
        self._endings = Endings()
        self._load = Load(free_blocks=num_blocks)
        self._unseen_tokens = 0
        self._unseen_blocks = 0
        # Ended since the heartbeat that counted them.
        self._gone_seqs = 0
        self._gone_tokens = 0
        self._show()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    def add(
        self,
        request_id: RequestId,
        *,
        tokens: int,
        blocks: int,
        begins_at: float,
        expected_output: int,
    ) -> None:
        """`begins_at`: the predicted first token."""
        slot = self._endings.add(begins_at, expected_output, tokens, blocks)
        sequence = _Sequence(tokens, blocks, slot)
        self._sequences[request_id] = self._unseen[request_id] = sequence
        self._unseen_tokens += tokens
        self._unseen_blocks += blocks
        self._show()

    def start(self, request_id: RequestId, now: float) -> None:
        """The first token was reported."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.started_at = now
            self._endings.begin(sequence.slot, now)

    def remove(self, request_id: RequestId) -> None:
        """The request ended. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self._endings.remove(sequence.slot)
        if request_id in self._unseen:
            self._see(request_id)
        else:
            self._gone_seqs += 1
            self._gone_tokens += sequence.tokens
        self._show()

    def correct(self, load: Load, now: float) -> None:
        """Takes over a heartbeat: what began SETTLE_S ago is counted in it."""
        self._load = load
        self._gone_seqs = 0
        self._gone_tokens = 0
        counted = [
            request_id
            for request_id, sequence in self._unseen.items()
            if sequence.started_at is not None and sequence.started_at + SETTLE_S <= now
        ]
        for request_id in counted:
            self._see(request_id)
        self._show()

    def drain(self, tbt_s: float, now: float) -> Drain:
        """The expected ends of sequences, with steps of `tbt_s`."""
        return self._endings.drain(tbt_s, now)

    def _see(self, request_id: RequestId) -> None:
        sequence = self._unseen.pop(request_id)
        self._unseen_tokens -= sequence.tokens
        self._unseen_blocks -= sequence.blocks

    def _sums(self) -> tuple[int, int, int]:
        """Sequences that run or will, tokens of their context, blocks that no placed request is going to need.

        Leased blocks belong to placements that are not running yet, so they are not subtracted twice.
        """
        load = self._load
        return (
            max(min(load.num_running, _MOST) - self._gone_seqs, 0) + len(self._unseen),
            max(min(load.context_tokens, _MOST) - self._gone_tokens, 0) + self._unseen_tokens,
            min(load.free_blocks, _MOST) - max(self._unseen_blocks - load.leased_blocks, 0),
        )

    def _show(self) -> None:
        table, row = self._seat.table, self._seat.row
        table.num_seqs[row], table.context_tokens[row], table.free_blocks[row] = self._sums()

    def validate(self) -> None:
        unseen = self._unseen.values()
        assert self._unseen.keys() <= self._sequences.keys()
        assert self._unseen_tokens == sum(s.tokens for s in unseen)
        assert self._unseen_blocks == sum(s.blocks for s in unseen)
        seen = self._sequences.keys() - self._unseen.keys()
        assert all(self._sequences[r].started_at is not None for r in seen)
        slots = {s.slot for s in self._sequences.values()}
        assert len(slots) == len(self._endings) == len(self), "two sequences share an expected end"
        self._endings.validate()
        table, row = self._seat.table, self._seat.row
        shown = (table.num_seqs[row], table.context_tokens[row], table.free_blocks[row])
        assert shown == self._sums(), "the row is stale"


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
