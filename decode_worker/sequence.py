"""`Sequence`: the mutable execution of one committed request.

Its slice is what the engine computes next. It is built once and advanced in place: between steps a decoding sequence
costs one append and three assignments, never a rebuild.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from engine.batch import PromptScores, Sampled, Slice, scores_for
from protocol.ids import BlockId, RequestId
from protocol.keys import BlockKey, child_key, pack_tokens
from protocol.request import FinishReason, Request, Token, finish_reason


class SequencePhase(Enum):
    """WAITING ⇄ RUNNING → ENDED. A waiting sequence without blocks was preempted; one with a move is not ready to run,
    or not to get blocks again, before that has ended."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Landed:
    """When it came from its prefill worker, and when it got its turn."""

    committed_at: float
    transfer_s: float  # as the prefill worker measured it
    began_at: float | None = None  # its first step


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Positions below `slice.start` have their KV in `block_table`; the last token's never is before its step."""

    request: Request
    order: int  # of arrival
    deadline_at: float
    token_ids: list[int]
    block_table: list[BlockId]  # empty after a preemption, and when ENDED outside a step
    phase: SequencePhase = SequencePhase.WAITING
    times_preempted: int = 0
    block_keys: list[BlockKey] = field(init=False)  # of leading full blocks
    num_kept: int = 0  # leading blocks that the home store was seen to have
    landed: Landed | None = None  # it came from a prefill worker
    move_id: int | None = None  # WAITING: its blocks are on their way to the store, or back
    slice: Slice = field(init=False)  # shares token_ids and block_table
    scores: PromptScores | None = field(init=False)  # of a prompt that is read here and scored

    def __post_init__(self) -> None:
        self.block_keys = list(self.request.block_keys)
        self.scores = scores_for(self.request)
        self.slice = Slice(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            start=len(self.token_ids) - 1,
            end=len(self.token_ids),
            block_table=self.block_table,
            sampling=self.request.sampling,
            num_prompt_tokens=self.request.num_prompt_tokens,
            samples=True,
            scores=self.scores,
        )

    @property
    def rank(self) -> tuple[int, int]:
        """Lower runs first and is preempted last."""
        return self.request.priority, self.order

    # What `engine.lookahead` predicts from.

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        return self.request.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def extend_keys(self, num_blocks: int, block_size: int) -> None:
        """The chain goes on over what was generated, to so many full blocks; it has begun."""
        for index in range(len(self.block_keys), num_blocks):
            tokens = self.token_ids[index * block_size : (index + 1) * block_size]
            self.block_keys.append(child_key(self.block_keys[-1], pack_tokens(tokens)))

    @property
    def num_missing(self) -> int:
        """Tokens without KV; 1 while decoding, more when recomputing."""
        return len(self.token_ids) - self.slice.start

    @property
    def is_new(self) -> bool:
        """It has had no token here."""
        return len(self.token_ids) == len(self.request.token_ids)

    @property
    def is_scored(self) -> bool:
        """All of it is computed here, whatever of its KV is known elsewhere."""
        return self.slice.scores is not None

    def has_room(self, block_size: int) -> bool:
        """Whether its blocks take the KV of all its tokens."""
        return len(self.token_ids) <= len(self.block_table) * block_size

    def rewind(self, num_computed: int) -> None:
        """Only the first `num_computed` tokens have KV (again)."""
        self.slice.start = num_computed
        self.slice.end = len(self.token_ids)
        self.slice.samples = True

    def limit_slice(self, num_tokens: int) -> None:
        """Computes at most `num_tokens` in the next step, sampling only when that reaches the end."""
        piece = self.slice
        piece.end = min(piece.start + num_tokens, len(self.token_ids))
        piece.samples = piece.end == len(self.token_ids)

    def following(self) -> Slice:
        """What comes behind the token that is being sampled now, whichever that is."""
        end = len(self.token_ids) + 1
        return replace(self.slice, start=end - 1, end=end, samples=True, follows=True)

    def ends_with_next(self, max_model_len: int) -> bool:
        """Whether the token that is being sampled now is its last, whichever that is."""
        num_tokens = len(self.token_ids) + 1
        num_generated = num_tokens - self.request.num_prompt_tokens
        return num_generated >= self.max_tokens or num_tokens >= max_model_len

    def skip_sampling(self) -> None:
        """A chunk was computed that does not reach the end."""
        self.rewind(self.slice.end)

    def append(self, sampled: Sampled, max_model_len: int) -> Token:
        """The slice was computed and this came out; sets up the next one."""
        request, piece = self.request, self.slice
        index = len(self.token_ids) - request.num_prompt_tokens
        reason = finish_reason(request.sampling, index, sampled.token_id)
        self.token_ids.append(sampled.token_id)
        if reason is None and len(self.token_ids) >= max_model_len:
            reason = FinishReason.LENGTH
        piece.start = piece.end
        piece.end += 1
        piece.scores = None
        return Token(
            request_id=request.request_id,
            index=index,
            token_id=sampled.token_id,
            logprobs=sampled.logprobs,
            finish_reason=reason,
        )


def rank_of(sequence: Sequence) -> tuple[int, int]:
    """To sort by."""
    return sequence.rank
