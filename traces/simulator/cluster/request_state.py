"""Live state of one request, as its gateway knows it: attempts, tokens, outcome.

PLACING → PREFILLING → DECODING → ENDED. After a loss PLACING again with the tokens so far
(`gateway.generation.request_state`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.latency import mean, mean_of_longest
from moonserve.protocol.request import Placement
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.results import End, RequestOutcome


class Phase(Enum):
    """Stage of a request."""

    PLACING = auto()  # also during the pause after a failed placement
    PREFILLING = auto()  # until its KV has landed
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """One request of the trace."""

    index: int
    record: TraceRecord
    num_outputs: int
    keys: tuple[BlockKey, ...]  # of the prompt's full blocks
    phase: Phase = Phase.PLACING
    attempt: int = 1
    placement: Placement | None = None  # set in PREFILLING and DECODING; the last one afterwards
    placed_at: float = 0.0  # time of `placement`
    num_generated: int = 0  # tokens that the gateway has received
    first_token_at: float | None = None
    last_token_at: float = 0.0  # valid once there are tokens
    gaps_s: list[float] = field(default_factory=list)
    excluded: frozenset[str] = frozenset()
    lost: dict[tuple[str, int], float] = field(default_factory=dict)  # incarnation → time of its loss
    retry_deadline: float | None = None  # deadline, set from the first failed placement until the next token
    end: End | None = None  # set in ENDED
    reason: str = ""
    ended_at: float = 0.0
    predicted_ttft_s: float = 0.0  # of the first attempt, like the last four fields
    served_by: str = ""  # the machine that served it, if there is no placement
    cached_tokens: int = 0
    queue_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def request_id(self) -> str:
        """Id of the current attempt."""
        return f"r{self.index}" if self.attempt == 1 else f"r{self.index}~{self.attempt}"

    @property
    def placed(self) -> Placement:
        """The current placement, or the last one. There must have been one."""
        assert self.placement is not None
        return self.placement

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the current attempt, including the tokens generated before it."""
        return self.record.input_length + self.num_generated

    @property
    def num_remaining(self) -> int:
        return self.num_outputs - self.num_generated

    def reusable_keys(self, block_size: int) -> Sequence[BlockKey]:
        """Returns the keys of blocks that may be reused. The last token is always computed: its logits give a token."""
        return self.keys[: (self.num_tokens - 1) // block_size]

    def take_token(self, at: float) -> None:
        """Takes a token from a prefill machine."""
        if self.first_token_at is None:
            self.first_token_at = at
        else:
            self.gaps_s.append(at - self.last_token_at)
        self.num_generated += 1
        self.last_token_at = at

    def take_tokens(self, gaps_s: Sequence[float], at: float) -> None:
        """Takes one token per gap from a decode machine. The last one came at `at` or just before."""
        self.gaps_s += gaps_s
        self.num_generated += len(gaps_s)
        self.last_token_at = at

    def finish(self, end: End, reason: str, now: float) -> None:
        assert self.end is None, "a request ends once"
        self.phase, self.end, self.reason, self.ended_at = Phase.ENDED, end, reason, now

    def outcome(self, began_at: float) -> RequestOutcome:
        """Returns the request's entry in the result. It must have ended. `began_at`: start of the trace."""
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
