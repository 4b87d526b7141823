"""One request's way through the cluster, as its gateway knows it: attempts, tokens, what became of it. Live state.

PLACING → PREFILLING → DECODING → ended; after a loss PLACING again with the tokens it has (`gateway.generation.state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from protocol.keys import BlockKey
from protocol.request import Placement
from protocol.timeline import mean, mean_of_longest
from traces.format import TraceRecord
from traces.simulator.results import End, RequestOutcome


class Phase(Enum):
    """Where a request is."""

    PLACING = auto()  # also while it pauses after a failed placing
    PREFILLING = auto()  # until its KV has landed
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Journey:
    """One request of the trace."""

    index: int
    record: TraceRecord
    num_outputs: int
    keys: tuple[BlockKey, ...]  # of the prompt's full blocks
    phase: Phase = Phase.PLACING
    attempt: int = 1
    placement: Placement | None = None  # PREFILLING, DECODING; then the last one
    placed_at: float = 0.0  # with placement
    num_generated: int = 0  # tokens that the gateway has
    first_token_at: float | None = None
    last_token_at: float = 0.0  # with tokens
    gaps_s: list[float] = field(default_factory=list)
    excluded: frozenset[str] = frozenset()
    lost: dict[tuple[str, int], float] = field(default_factory=dict)  # incarnations; when
    impatient_at: float | None = None  # from the first failed placing to the next token
    end: End | None = None  # ENDED
    reason: str = ""
    ended_at: float = 0.0
    predicted_ttft_s: float = 0.0  # of the first attempt, like the next four
    served_by: str = ""  # by a machine that does both, where there is no placement
    cached_tokens: int = 0
    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def request_id(self) -> str:
        """Of the current attempt."""
        return f"r{self.index}" if self.attempt == 1 else f"r{self.index}~{self.attempt}"

    @property
    def num_tokens(self) -> int:
        """Of the prompt of the current attempt, what was generated before included."""
        return self.record.input_length + self.num_generated

    @property
    def num_remaining(self) -> int:
        return self.num_outputs - self.num_generated

    def usable(self, block_size: int) -> Sequence[BlockKey]:
        """Blocks that need not be computed. The last token always is: its logits are the first token."""
        return self.keys[: (self.num_tokens - 1) // block_size]

    def take_token(self, at: float) -> None:
        """A prefill machine's token reached the gateway."""
        if self.first_token_at is None:
            self.first_token_at = at
        else:
            self.gaps_s.append(at - self.last_token_at)
        self.num_generated += 1
        self.last_token_at = at

    def take_decoded(self, gaps_s: Sequence[float], at: float) -> None:
        """So many tokens of a decode machine, the last one at `at` or just before."""
        self.gaps_s += gaps_s
        self.num_generated += len(gaps_s)
        self.last_token_at = at

    def finish(self, end: End, reason: str, now: float) -> None:
        assert self.end is None, "a request ends once"
        self.phase, self.end, self.reason, self.ended_at = Phase.ENDED, end, reason, now

    def outcome(self, began_at: float) -> RequestOutcome:
        """What the result says of it; it has ended. `began_at`: of the trace."""
        assert self.end is not None
        arrived_at = self.record.arrived_s
        ttft_s = None if self.first_token_at is None else self.first_token_at - arrived_at
        placement = self.placement
        return RequestOutcome(
            index=self.index,
            arrived_s=arrived_at - began_at,
            input_length=self.record.input_length,
            output_length=self.num_outputs,
            end=self.end,
            reason=self.reason,
            prefill=self.served_by if placement is None else placement.prefill.instance_id,
            decode=self.served_by if placement is None else placement.decode.instance_id,
            cached_tokens=self.cached_tokens,
            queue_s=self.queue_s,
            load_s=self.load_s,
            prefill_s=self.prefill_s,
            predicted_ttft_s=self.predicted_ttft_s,
            ttft_s=ttft_s,
            tbt_s=mean_of_longest(self.gaps_s) if self.gaps_s else None,
            mean_gap_s=mean(self.gaps_s) if self.gaps_s else None,
            finished_s=self.ended_at - began_at if self.end is End.COMPLETED else None,
        )
