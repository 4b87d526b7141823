"""Expected load of one decode instance: the sequences placed there, corrected by heartbeats. Pure.

Begins and ends of placed sequences are in the `DecodeForecast` of all instances. A surplus or deficit in the instance's
report is assumed to last until the next heartbeat. A placement is *settled* `VISIBLE_AFTER_S` after its first token,
when heartbeats include it. Sums are written to the instance's row whenever they change.
"""

from dataclasses import dataclass

import numpy as np

from moonserve.conductor.events import Load
from moonserve.conductor.prediction.decode_forecast import DecodeForecast, ExpectedEnds
from moonserve.conductor.prediction.instance_table import DecodeTable, RowRef
from moonserve.conductor.prediction.queue_time import VISIBLE_AFTER_S
from moonserve.protocol.output_length import OutputLengths
from moonserve.protocol.request import RequestId
from moonserve.protocol.step_time import DecodeProfile

# Upper limit of reported tokens, so that sums of them stay exact in a float.
_MAX_TOKENS = 2**53
_LEAST_STEP_S = 1e-6


@dataclass(slots=True, eq=False)
class _Sequence:
    """One placed request that has not ended."""

    tokens: int
    blocks: int
    slot: int  # in the outlook
    started_at: float | None = None  # time at which its first token was reported


class DecodeLoad:
    """Sequences placed on one decode instance, and its reported load beyond them."""

    def __init__(self, num_blocks: int, row_ref: RowRef[DecodeTable], outlook: DecodeForecast) -> None:
        self._row_ref = row_ref
        self._outlook = outlook
        self._number = outlook.add_instance()
        self._sequences: dict[RequestId, _Sequence] = {}
        self._unseen: dict[RequestId, _Sequence] = {}  # sequences not settled at the last heartbeat
        self._unseen_blocks = 0
        self._num_started = 0
        self._load = Load(free_blocks=num_blocks)
        # Number and context tokens of sequences placed by others; negative for own ones that the instance has lost.
        self._others = (0.0, 0.0)
        row_ref.table.number[row_ref.row] = self._number
        self._write_row()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._sequences

    @property
    def num_running(self) -> float:
        """Estimated number of running sequences."""
        return max(self._num_started + self._others[0], 0.0)

    def add(
        self,
        request_id: RequestId,
        *,
        tokens: int,
        max_tokens: int,
        blocks: int,
        begins_at: float,
        step_s: float,
        expected_output: float,
    ) -> None:
        """Adds a placed request. `begins_at`: predicted time of its first token; `step_s`: predicted time between
        tokens."""
        slot = self._outlook.add(
            self._number,
            tokens=tokens,
            most=max(max_tokens, 1),
            begins_at=begins_at,
            step_s=max(step_s, _LEAST_STEP_S),  # a formula may be all zeros
            expected=max(expected_output, 1.0),
        )
        sequence = _Sequence(tokens, blocks, slot)
        self._sequences[request_id] = self._unseen[request_id] = sequence
        self._unseen_blocks += blocks
        self._write_row()

    def start(self, request_id: RequestId, now: float) -> None:
        """Marks a request as running, when its first token is reported. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.started_at is None:
            sequence.started_at = now
            self._num_started += 1
            self._outlook.begin(sequence.slot, now)

    def remove(self, request_id: RequestId) -> None:
        """Removes a request that ended. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self._outlook.remove(sequence.slot)
        self._num_started -= sequence.started_at is not None
        self._settle(request_id)
        self._write_row()

    def correct(self, load: Load, profile: DecodeProfile, lengths: OutputLengths, now: float) -> None:
        """Adopts the load of a heartbeat, and estimates again how long running sequences continue, from answers that
        reached the same length."""
        self._load = load
        for request_id, sequence in list(self._unseen.items()):
            if sequence.started_at is not None and sequence.started_at + VISIBLE_AFTER_S <= now:
                self._settle(request_id)
        self._others = self._beyond_own(load)
        self._write_row()
        progress = self._outlook.running(self._number, now)
        if progress.slots.size:
            remaining = lengths.remaining(progress.generated.astype(np.int64), progress.most.astype(np.int64))
            step_s = max(profile.step_s(max(load.num_running, 1), min(load.context_tokens, _MAX_TOKENS)), _LEAST_STEP_S)
            self._outlook.update_remaining(progress, remaining, step_s, now)

    def expected_ends(self, now: float) -> ExpectedEnds:
        """Returns the expected ends of the sequences placed here."""
        return self._outlook.expected_ends(self._number, now)

    def detach(self) -> None:
        """Removes the instance from the outlook. Its requests can still be removed afterwards."""
        self._outlook.remove_instance(self._number)

    def _settle(self, request_id: RequestId) -> None:
        sequence = self._unseen.pop(request_id, None)
        if sequence is not None:
            self._unseen_blocks -= sequence.blocks

    def _beyond_own(self, load: Load) -> tuple[float, float]:
        running = load.num_running
        if running > self._num_started:
            more = running - self._num_started
            return float(more), min(load.context_tokens, _MAX_TOKENS) * (more / running)
        seen = [s.tokens for r, s in self._sequences.items() if r not in self._unseen]
        gone = max(len(seen) - running - load.num_waiting, 0)  # their ends were not reported
        return (-float(gone), -gone * sum(seen) / len(seen)) if gone else (0.0, 0.0)

    def _row_values(self) -> tuple[float, float, int]:
        """Returns the figures of the row. Leased blocks belong to unsettled placements, so they are subtracted once."""
        free_blocks = self._load.free_blocks - max(self._unseen_blocks - self._load.leased_blocks, 0)
        return (*self._others, free_blocks)

    def _write_row(self) -> None:
        table, row = self._row_ref.table, self._row_ref.row
        table.other_seqs[row], table.other_tokens[row], table.free_blocks[row] = self._row_values()

    def validate(self) -> None:
        unseen = self._unseen.values()
        assert self._unseen.keys() <= self._sequences.keys()
        assert self._unseen_blocks == sum(s.blocks for s in unseen)
        assert self._num_started == sum(s.started_at is not None for s in self._sequences.values())
        seen = self._sequences.keys() - self._unseen.keys()
        assert all(self._sequences[r].started_at is not None for r in seen)
        slots = {s.slot for s in self._sequences.values()}
        assert len(slots) == len(self), "two sequences share an expected end"
        table, row = self._row_ref.table, self._row_ref.row
        shown = (table.other_seqs[row], table.other_tokens[row], table.free_blocks[row])
        assert shown == self._row_values(), "the row is stale"
        assert table.number[row] == self._number
