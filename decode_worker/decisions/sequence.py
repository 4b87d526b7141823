"""Sequences: the mutable execution state of committed requests.

The sequence's slice is what the engine computes next. It is built once and advanced in place: between steps a decoding
sequence costs one append and three assignments, never a rebuild.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from moonserve.decode_worker.decisions.speculation import PromptLookup
from moonserve.engine.model.batch import PromptScores, Sampled, Slice, scores_for
from moonserve.protocol.kv_blocks import BlockKey, child_key, pack_tokens
from moonserve.protocol.request import BlockId, FinishReason, Request, RequestId, Token, finish_reason


class SequencePhase(Enum):
    """Phases of a sequence: WAITING ⇄ RUNNING → ENDED. A waiting sequence without blocks was preempted. A waiting
    sequence with a move gets no blocks (put) or does not run (read) before the move has ended."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class HandoffTimes:
    """Times of a sequence's handoff from its prefill worker and of its first step."""

    committed_at: float
    transfer_s: float  # measured by the prefill worker
    began_at: float | None = None  # start of its first step


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request's tokens and blocks. Positions below `slice.start` have their KV in `block_table`. The KV of the last
    token is never there before the token's step."""

    request: Request
    order: int  # order of arrival
    deadline_at: float
    token_ids: list[int]
    block_table: list[BlockId]  # empty after a preemption, and when ENDED outside a step
    phase: SequencePhase = SequencePhase.WAITING
    times_preempted: int = 0
    block_keys: list[BlockKey] = field(init=False)  # keys of leading full blocks
    num_stored: int = 0  # leading blocks that the home store is known to have
    handoff_times: HandoffTimes | None = None  # set if the sequence came from a prefill worker
    move_id: int | None = None  # its blocks are being put into the store, or read back
    lookup: PromptLookup | None = None  # set once it may draft
    num_drafted: int = 0  # draft tokens that were computed
    num_accepted: int = 0  # of these, tokens that were right
    slice: Slice = field(init=False)  # shares token_ids and block_table
    scores: PromptScores | None = field(init=False)  # set if the prompt is computed and scored here

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
        """(priority, order of arrival). The lower rank runs first and is preempted last."""
        return self.request.priority, self.order

    # The rest of `engine.admission_policy.SequenceView`.

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
        """Extends the key chain over generated tokens to `num_blocks` full blocks. The chain must not be empty."""
        for index in range(len(self.block_keys), num_blocks):
            tokens = self.token_ids[index * block_size : (index + 1) * block_size]
            self.block_keys.append(child_key(self.block_keys[-1], pack_tokens(tokens)))

    @property
    def num_missing(self) -> int:
        """Number of tokens without KV: 1 while decoding, more while a prompt or a preempted sequence is computed."""
        return len(self.token_ids) - self.slice.start

    @property
    def is_new(self) -> bool:
        """True if the sequence has generated no token on this worker."""
        return len(self.token_ids) == len(self.request.token_ids)

    @property
    def is_scored(self) -> bool:
        """True if the prompt is scored. All of it is computed here then, even if parts of its KV are cached."""
        return self.slice.scores is not None

    def has_room(self, block_size: int) -> bool:
        """Returns True if the sequence's blocks have room for the KV of all its tokens."""
        return len(self.token_ids) <= len(self.block_table) * block_size

    def rewind(self, num_computed: int) -> None:
        """Sets the slice to compute all tokens after the first `num_computed`, which have KV."""
        self.slice.start = num_computed
        self.slice.end = len(self.token_ids)
        self.slice.samples = True

    def limit_slice(self, num_tokens: int) -> None:
        """Limits the next step to `num_tokens` tokens; it samples only if it reaches the end of the sequence."""
        piece = self.slice
        piece.end = min(piece.start + num_tokens, len(self.token_ids))
        piece.samples = piece.end == len(self.token_ids)

    def following(self) -> Slice:
        """Returns the slice after the token that is being sampled now, before that token is known."""
        end = len(self.token_ids) + 1
        return replace(self.slice, start=end - 1, end=end, samples=True, token_from_previous_step=True)

    def ends_with_next(self, max_model_len: int) -> bool:
        """Returns True if the token that is being sampled now reaches a length limit, whichever token it is."""
        num_tokens = len(self.token_ids) + 1
        num_generated = num_tokens - self.request.num_prompt_tokens
        return num_generated >= self.max_tokens or num_tokens >= max_model_len

    def draft_room(self, block_size: int, max_model_len: int) -> int:
        """Returns how many draft tokens the next step may compute: as many as fit into the blocks that the sequence has
        anyway, if the step's tokens, one more than the draft, stay within the length limits. A draft follows at least
        one output token. There is none for requests with a grammar, and while a prompt is computed or scored."""
        if self.num_missing > 1 or self.is_scored or self.request.sampling.grammar:
            return 0
        num_tokens, num_prompt_tokens = len(self.token_ids), self.request.num_prompt_tokens
        if num_tokens == num_prompt_tokens:
            return 0
        longest = min(max_model_len, num_prompt_tokens + self.max_tokens)
        return min(len(self.block_table) * block_size - num_tokens, longest - num_tokens - 1)

    def with_draft(self, draft: list[int]) -> Slice:
        """Returns the slice that also computes the draft. The sequence itself does not change."""
        tokens = [*self.token_ids, *draft]
        return replace(self.slice, token_ids=tokens, end=len(tokens), num_draft=len(draft))

    def accept(self, sampled: Sampled, piece: Slice, max_model_len: int) -> list[Token]:
        """Appends the tokens that a step sampled, up to the first one that ends the sequence or differs from the draft
        in `piece`, the step's slice. Returns them."""
        tokens = [self.append(sampled, max_model_len)]
        for following in sampled.after_draft:
            is_right = self.token_ids[-1] == piece.token_ids[len(self.token_ids) - 1]
            if not is_right or tokens[-1].finish_reason is not None:
                break
            tokens.append(self.append(following, max_model_len))
        self.num_drafted += piece.num_draft
        self.num_accepted += len(tokens) - 1
        if tokens[-1].finish_reason is not None:
            tokens[-1] = replace(tokens[-1], num_draft_tokens=self.num_drafted, num_accepted_tokens=self.num_accepted)
        return tokens

    def append(self, sampled: Sampled, max_model_len: int) -> Token:
        """Appends the sampled token, advances the slice to it and returns the token for the gateway."""
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
    """Sort key: the sequence's rank."""
    return sequence.rank
