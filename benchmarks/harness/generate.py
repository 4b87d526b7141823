"""The coupled reference: prefills and decodes all prompts in one process.

It does continuous batching with chunked prefill over a `BlockPool`, nothing more. Tests compare the cluster with it,
and benchmarks measure the cost of disaggregation with it; no server uses it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonserve.engine.engine import Engine
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey, block_keys, root_key
from moonserve.protocol.request import BlockId, FinishReason, Logprobs, RequestId, SamplingParams, finish_reason

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of one prompt."""

    token_ids: list[int]  # generated tokens only
    logprobs: list[Logprobs | None]
    finish_reason: FinishReason
    cached_tokens: int  # prompt tokens that were not computed


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    keys: list[BlockKey]  # keys of the prompt's full blocks; empty without prefix caching
    blocks: list[BlockId] = field(default_factory=list)  # enough for the longest output, once admitted
    num_computed: int = 0
    num_published: int = 0
    cached_tokens: int = 0
    logprobs: list[Logprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    chunk_size: int = 512,
    max_num_seqs: int = 64,
    enable_prefix_caching: bool = False,
) -> list[Generation]:
    """Continues every prompt. `chunk_size`: prompt tokens per step, over all sequences. Raises InvalidRequest for a
    prompt that is empty or cannot fit the pool, or whose grammar cannot be followed."""
    wishes = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    loop = _BatchLoop(engine, chunk_size, max_num_seqs, enable_prefix_caching)
    for prompt, wish in zip(prompts, wishes, strict=True):
        loop.add(list(prompt), wish)
    return loop.run()


class _BatchLoop:
    def __init__(self, engine: Engine, chunk_size: int, max_num_seqs: int, caching: bool) -> None:
        self._engine = engine
        self._chunk_size = chunk_size
        self._max_num_seqs = max_num_seqs
        self._root = root_key(engine.fingerprint) if caching else None
        self._pool = BlockPool(
            engine.num_blocks,
            on_added=lambda _key, _parent: None,
            on_removed=lambda _key: None,
            enable_prefix_caching=caching,
        )
        self._all: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []

    def add(self, prompt: list[int], sampling: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequest("a prompt needs at least one token", param="prompt")
        if self._blocks_for(len(prompt), sampling) > self._pool.num_blocks:
            raise InvalidRequest(
                f"{len(prompt)} + {sampling.max_tokens} tokens do not fit a pool of {self._pool.num_blocks} blocks",
                param="prompt",
            )
        block_size = self._engine.layout.block_size
        sequence = _Sequence(
            request_id=RequestId(f"generate-{len(self._all)}"),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            keys=block_keys(self._root, prompt, block_size) if self._root else [],
        )
        self._all.append(sequence)
        self._waiting.append(sequence)

    def run(self) -> list[Generation]:
        while self._waiting or self._running:
            self._admit()
            slices = self._make_slices()
            for piece, sampled in zip(slices, self._engine.execute(slices), strict=True):
                self._advance(piece, sampled)
            self._running = [one for one in self._running if one.finish_reason is None]
        self._pool.validate()
        return [_generation(sequence) for sequence in self._all]

    def _blocks_for(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        return self._engine.layout.blocks_for(num_prompt_tokens + sampling.max_tokens)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            if not self._start(self._waiting[0]):
                return
            self._running.append(self._waiting.popleft())

    def _start(self, sequence: _Sequence) -> bool:
        """Allocates the sequence's blocks. Returns False if it must wait for other sequences to end."""
        block_size = self._engine.layout.block_size
        # The last prompt token is always computed: its logits give the first token.
        usable = sequence.keys[: (sequence.num_prompt_tokens - 1) // block_size]
        cached = self._pool.match_prefix(usable)
        self._pool.retain(cached)
        needed = self._blocks_for(sequence.num_prompt_tokens, sequence.sampling) - len(cached)
        fresh = self._pool.allocate(needed)
        if fresh is None:
            self._pool.release(cached)
            return False
        self._pool.count_hits(cached)
        sequence.blocks = cached + fresh
        sequence.num_published = len(cached)
        sequence.num_computed = sequence.cached_tokens = len(cached) * block_size
        return True

    def _make_slices(self) -> list[Slice]:
        slices: list[Slice] = []
        budget = self._chunk_size
        for sequence in self._running:
            length = len(sequence.token_ids)
            end = length
            if sequence.num_computed < length - 1:  # prefill
                end = min(length, sequence.num_computed + budget)
                budget -= end - sequence.num_computed
            if end > sequence.num_computed:
                slices.append(_slice(sequence, end))
        return slices

    def _advance(self, piece: Slice, sampled: Sampled | None) -> None:
        sequence = next(one for one in self._running if one.request_id == piece.request_id)
        sequence.num_computed = piece.end
        self._publish(sequence)
        if sampled is None:
            return
        if sampled.failure is not None:
            raise InvalidRequest(sampled.failure, request=sequence.request_id)
        index = len(sequence.token_ids) - sequence.num_prompt_tokens
        sequence.token_ids.append(sampled.token_id)
        sequence.logprobs.append(sampled.logprobs)
        sequence.finish_reason = finish_reason(sequence.sampling, index, sampled.token_id)
        if sequence.finish_reason is not None:
            self._pool.release(sequence.blocks)

    def _publish(self, sequence: _Sequence) -> None:
        block_size = self._engine.layout.block_size
        full = min(len(sequence.keys), sequence.num_computed // block_size)
        for index in range(sequence.num_published, full):
            parent = sequence.keys[index - 1] if index else self._root
            if parent is not None:
                # Blocks do not leave this process, so checksums are not needed.
                self._pool.publish(sequence.blocks[index], sequence.keys[index], parent, 0)
        sequence.num_published = max(sequence.num_published, full)


def greedy_slice(
    name: str,
    token_ids: Sequence[int],
    start: int,
    end: int,
    blocks: Sequence[BlockId],
    *,
    num_prompt_tokens: int | None = None,
) -> Slice:
    """Returns a slice that samples one greedy token if it computes the last of `token_ids`. `num_prompt_tokens`: None =
    all of them."""
    return Slice(
        request_id=RequestId(name),
        token_ids=token_ids,
        start=start,
        end=end,
        block_table=blocks,
        sampling=_GREEDY,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        samples=end == len(token_ids),
    )


def _slice(sequence: _Sequence, end: int) -> Slice:
    return Slice(
        request_id=sequence.request_id,
        token_ids=sequence.token_ids,
        start=sequence.num_computed,
        end=end,
        block_table=sequence.blocks,
        sampling=sequence.sampling,
        num_prompt_tokens=sequence.num_prompt_tokens,
        samples=end == len(sequence.token_ids),
    )


def _generation(sequence: _Sequence) -> Generation:
    if sequence.finish_reason is None:
        raise RuntimeError(f"{sequence.request_id} never finished")
    return Generation(
        token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
        logprobs=sequence.logprobs,
        finish_reason=sequence.finish_reason,
        cached_tokens=sequence.cached_tokens,
    )
