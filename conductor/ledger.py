"""What the conductor expects each instance to be busy with: its own placements, corrected by what instances report.

`PrefillQueue` is one prefill instance's predicted work, `DecodeBook` one decode instance's sequences. A placement is
*settled* after SETTLE_S: by then the instance has heard of it, and a heartbeat without it means that it is done. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from conductor.events import Load
from protocol.ids import RequestId
from protocol.profile import PrefillProfile

# Gateway hop, submission and the worker's own bookkeeping, with room for a busy machine.
SETTLE_S = 0.5


@dataclass(slots=True, eq=False)
class _Job:
    """One placed prompt that is not known to be prefilled."""

    placed_at: float
    seconds: float  # predicted
    tokens: int  # uncached


class PrefillQueue:
    """Predicted prefill work of one instance, in the order of placement."""

    def __init__(self) -> None:
        self._jobs: dict[RequestId, _Job] = {}
        self._total_s = 0.0
        self._total_tokens = 0
        self._head_since = 0.0  # when the head began to run, as far as known
        self._surplus_s = 0.0  # work the instance reports beyond what was placed by this conductor

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._jobs

    def add(self, request_id: RequestId, seconds: float, tokens: int, now: float) -> None:
        if not self._jobs:
            self._head_since = now
        self._jobs[request_id] = _Job(now, seconds, tokens)
        self._total_s += seconds
        self._total_tokens += tokens

    def remove(self, request_id: RequestId, now: float) -> None:
        """The prompt is prefilled, or given up. Unknown ids are ignored: a heartbeat may have told it first."""
        if request_id not in self._jobs:
            return
        was_head = next(iter(self._jobs)) == request_id
        job = self._jobs.pop(request_id)
        self._total_s -= job.seconds
        self._total_tokens -= job.tokens
        if was_head:
            self._head_since = now
        if not self._jobs:  # floating-point residue must not accumulate
            self._total_s = 0.0

    def estimate_s(self, now: float) -> float:
        """Seconds until a prompt placed now would begin to run."""
        if not self._jobs:
            return self._surplus_s
        head = next(iter(self._jobs.values()))
        elapsed = min(max(now - self._head_since, 0.0), head.seconds)
        return max(self._total_s - elapsed, 0.0) + self._surplus_s

    def correct(self, load: Load, profile: PrefillProfile, now: float) -> None:
        """Takes over what the instance says that it has left: settled prompts beyond it are prefilled already."""
        settled = {r: j for r, j in self._jobs.items() if j.placed_at + SETTLE_S <= now}
        tokens_left = sum(job.tokens for job in settled.values())
        for request_id, job in settled.items():
            tokens_left -= job.tokens
            if tokens_left < load.queued_tokens:
                break
            self.remove(request_id, now)
        surplus = load.queued_tokens - self._total_tokens
        self._surplus_s = profile.c0 + profile.c1 * surplus if surplus > 0 else 0.0

    def validate(self) -> None:
        assert math.isclose(
            self._total_s, sum(j.seconds for j in self._jobs.values()), rel_tol=1e-6, abs_tol=1e-6
        )
        assert self._total_tokens == sum(j.tokens for j in self._jobs.values())
        assert self._surplus_s >= 0.0


@dataclass(slots=True, eq=False)
class _Sequence:
    """One placed request that has not ended."""

    tokens: int
    blocks: int
    begins_at: float  # predicted first token, then the reported one
    expected_output: int
    started: bool  # its first token was reported
    seen: bool  # counted in the instance's last heartbeat


class DecodeBook:
    """Sequences of one decode instance: the last heartbeat, plus what it cannot have counted yet."""

    def __init__(self, num_blocks: int) -> None:
        self._sequences: dict[RequestId, _Sequence] = {}
        self._load = Load(free_blocks=num_blocks)
        self._unseen_seqs = 0
        self._unseen_tokens = 0
        self._unseen_blocks = 0
        # Ended since the heartbeat that counted them.
        self._gone_seqs = 0
        self._gone_tokens = 0
        self.num_seqs = 0  # that run or will
        self.context_tokens = 0  # of those
        self.free_blocks = num_blocks  # that no placed request is going to need for its prompt

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
        self._sequences[request_id] = _Sequence(
            tokens, blocks, begins_at, expected_output, started=False, seen=False
        )
        self._unseen_seqs += 1
        self._unseen_tokens += tokens
        self._unseen_blocks += blocks
        self._recount()

    def start(self, request_id: RequestId, now: float) -> None:
        """The first token was reported."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.started = True
            sequence.begins_at = now

    def remove(self, request_id: RequestId) -> None:
        """The request ended. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence.seen:
            self._gone_seqs += 1
            self._gone_tokens += sequence.tokens
        else:
            self._forget_unseen(sequence)
        self._recount()

    def correct(self, load: Load, now: float) -> None:
        """Takes over a heartbeat: what began SETTLE_S ago is counted in it."""
        self._load = load
        self._gone_seqs = 0
        self._gone_tokens = 0
        for sequence in self._sequences.values():
            if sequence.started and not sequence.seen and sequence.begins_at + SETTLE_S <= now:
                sequence.seen = True
                self._forget_unseen(sequence)
        self._recount()

    def drain(self, tbt_s: float, now: float) -> list[tuple[float, int, int]]:
        """(seconds from now, tokens, blocks) of the expected ends of sequences, soonest first."""
        ends = [
            (max(s.begins_at + s.expected_output * tbt_s - now, tbt_s), s.tokens, s.blocks)
            for s in self._sequences.values()
        ]
        return sorted(ends)

    def _recount(self) -> None:
        """Sums up after a change, since sums are read far more often than they change.

        Leased blocks belong to placements that are not running yet, so they are not subtracted twice.
        """
        load = self._load
        self.num_seqs = max(load.num_running - self._gone_seqs, 0) + self._unseen_seqs
        self.context_tokens = max(load.context_tokens - self._gone_tokens, 0) + self._unseen_tokens
        self.free_blocks = load.free_blocks - max(self._unseen_blocks - load.leased_blocks, 0)

    def _forget_unseen(self, sequence: _Sequence) -> None:
        self._unseen_seqs -= 1
        self._unseen_tokens -= sequence.tokens
        self._unseen_blocks -= sequence.blocks

    def validate(self) -> None:
        unseen = [s for s in self._sequences.values() if not s.seen]
        assert self._unseen_seqs == len(unseen)
        assert self._unseen_tokens == sum(s.tokens for s in unseen)
        assert self._unseen_blocks == sum(s.blocks for s in unseen)
        assert all(s.started for s in self._sequences.values() if s.seen)
        sums = (self.num_seqs, self.context_tokens, self.free_blocks)
        self._recount()
        assert sums == (self.num_seqs, self.context_tokens, self.free_blocks)
