"""Simulated model. Its KV is a running hash of the tokens; the next token is a hash of it, the seed and the position.

It reads the KV bytes in the pool, as an engine does, and checks every one. KV that is stale, torn, missing or another
sequence's is reported as a problem by the step that reads it, not only through a wrong token.
"""

import asyncio
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from moonserve.engine.model.batch import Sampled, Slice
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.request import SamplingParams, finish_reason

VOCABULARY = 64
LAYOUT = KvLayout(num_layers=1, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
FINGERPRINT = "simulated"
_MASK = (1 << 64) - 1
_EMPTY = 0x6A09E667F3BCC909
_SIZE, _TOKEN, _PIECE = LAYOUT.block_size, LAYOUT.token_bytes, LAYOUT.piece_bytes
_KV = struct.Struct("<Q")
assert _KV.size == _TOKEN


def mix(state: int, value: int) -> int:
    state = (state * 0x9E3779B97F4A7C15 + value * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 29)


def next_token(state: int, sampling: SamplingParams, position: int) -> int:
    """Returns the token at `position`, which follows tokens whose running hash is `state`. Half of the requests repeat
    themselves most of the time."""
    drawn = mix(state ^ sampling.seed, position) >> 20
    return position % 3 if sampling.seed % 2 and drawn % 8 else drawn // 8 % VOCABULARY


def undisturbed(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], str]:
    """Returns the tokens and the finish reason that a client of this prompt must receive."""
    state, tokens = _EMPTY, list(prompt)
    for token in prompt:
        state = mix(state, token)
    for index in range(sampling.max_tokens):
        token = next_token(state, sampling, len(tokens))
        tokens.append(token)
        state = mix(state, token)
        reason = finish_reason(sampling, index, token)
        if reason is not None:
            return tokens[len(prompt) :], reason.value
    raise AssertionError("max_tokens ends every request")


class _Sequence:
    """Expected KV of one request's tokens, as far as it has been computed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        self.keys = bytearray()
        self.values = bytearray()

    def follow(self, tokens: Sequence[int]) -> None:
        """Extends the sequence to these tokens. Starts anew if they do not continue it."""
        if self.tokens != list(tokens[: len(self.tokens)]):
            del self.tokens[:], self.states[:], self.keys[:], self.values[:]
        state = self.states[-1] if self.states else _EMPTY
        for token in tokens[len(self.tokens) :]:
            state = mix(state, token)
            self.tokens.append(token)
            self.states.append(state)
            self.keys += _KV.pack(state)
            self.values += _KV.pack(state ^ _MASK)


class Engine:
    """Replacement of `engine.engine.EngineThread` that computes this model in a worker's KV memory."""

    def __init__(
        self,
        memory: memoryview,
        num_blocks: int,
        rng: random.Random,
        failures: Callable[[], float],
        problem: Callable[[str], None],
    ) -> None:
        """`failures` returns the current probability that a step raises."""
        self._keys = memory[: num_blocks * _PIECE]
        self._values = memory[num_blocks * _PIECE :]
        self._sequences: dict[str, _Sequence] = {}  # by request
        self._rng = rng
        self._failures = failures
        self._problem = problem
        self._last: dict[str, int] = {}  # by request: token that the latest step sampled
        self._lost: set[str] = set()  # requests of a failed latest step; steps that follow it yield garbage

    async def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        before_attention: Callable[[int], None] | None = None,
        hidden: Any = None,
    ) -> list[Sampled | None]:
        sampled = await self.end(slices)
        if on_layer is not None:
            on_layer(0)
        return sampled

    async def begin(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        """Returns the slices. They are computed in `end`, as late as possible."""
        return slices

    async def end(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Computes after a delay too long for the decode worker to compute inline, where no virtual time would pass."""
        await asyncio.sleep(self._rng.uniform(0.025, 0.06))
        return self.execute_inline(slices)

    def execute_inline(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        if self._rng.random() < self._failures():
            self._lost = {piece.request_id for piece in slices}
            raise RuntimeError("the device fell off the bus")
        lost, self._lost = self._lost, set()
        sampled = [
            Sampled(request_id=piece.request_id, token_id=VOCABULARY)  # garbage
            if piece.token_from_previous_step and piece.request_id in lost
            else self._sample(piece)
            for piece in slices
        ]
        self._last = {each.request_id: each.token_id for each in sampled if each is not None}
        return sampled

    def _sample(self, piece: Slice) -> Sampled | None:
        states = self._compute(piece)
        if not piece.samples:
            return None
        token, *others = [
            Sampled(request_id=piece.request_id, token_id=next_token(states[end - 1], piece.sampling, end))
            for end in range(piece.end - piece.num_draft, piece.end + 1)
        ]
        return replace(token, after_draft=tuple(others))

    def _compute(self, piece: Slice) -> list[int]:
        """Checks the KV before the slice, writes the slice's KV and returns the running hash at each position."""
        tokens = list(piece.token_ids[: piece.end])
        if len(tokens) < piece.end:
            tokens.append(self._last[piece.request_id])
        sequence = self._sequences.setdefault(piece.request_id, _Sequence())
        sequence.follow(tokens)
        for place, part in _runs(piece, 0, piece.start):
            if self._keys[place] != sequence.keys[part] or self._values[place] != sequence.values[part]:
                self._problem(f"{piece.request_id} computes from wrong KV before {part.stop // _TOKEN}")
        for place, part in _runs(piece, piece.start, piece.end):
            self._keys[place] = sequence.keys[part]
            self._values[place] = sequence.values[part]
        return sequence.states


def _runs(piece: Slice, start: int, end: int) -> Iterator[tuple[slice, slice]]:
    """Yields, block by block, where the bytes of these positions are in the pool and in the sequence."""
    while start < end:
        stop = min(end, (start // _SIZE + 1) * _SIZE)
        at = piece.block_table[start // _SIZE] * _PIECE + start % _SIZE * _TOKEN
        yield slice(at, at + (stop - start) * _TOKEN), slice(start * _TOKEN, stop * _TOKEN)
        start = stop
