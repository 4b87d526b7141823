"""Computes masks of the tokens that a grammar allows next, for the sequences of a step.

**A mask is a function of (grammar, tokens generated so far), nothing else.** A matcher that follows a sequence is only
a cache: if there is none, or it has read other tokens, a new one reads all tokens from the start. So the masks stay the
same if a sequence is preempted, moves to another worker or is continued after a loss.

Masks do not depend on logits, so a separate thread computes them while the forward pass runs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moonserve.engine.model.batch import Slice
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.grammar import GrammarCache
from moonserve.protocol.request import RequestId

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A matcher is dropped after this many steps without its sequence, which has ended or has to wait long.
_MAX_IDLE_STEPS = 256

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Tokens that one row of logits may become, or the reason why there are none."""

    mask: Mask | None  # [vocab]; None after a failure
    failure: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _Follower:
    """A matcher and the tokens that it has read."""

    matcher: "LLMatcher"
    grammar: str
    read: list[int] = field(default_factory=list)
    used_in: int  # number of the last step with this sequence


class GrammarMasks:
    """Mask computation of one engine. Not thread-safe: one step at a time, except for `prepare`."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`folder`: the model folder; see `GrammarCache`."""
        self._grammars = GrammarCache(folder, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        # Least recently used first.
        self._followers: OrderedDict[RequestId, _Follower] = OrderedDict()
        self._num_steps = 0

    def prepare(self, grammar: str) -> None:
        """Compiles a grammar ahead of its first step. Callable from any thread. Raises InvalidRequest."""
        self._grammars.new_matcher(grammar)

    def begin(self, slices: Sequence[Slice]) -> Future[list[AllowedTokens | None]] | None:
        """Starts computing one entry per slice, None for slices without a grammar. Returns None if no slice has one."""
        if not any(piece.sampling.grammar for piece in slices):
            return None
        return self._thread.submit(self.of, slices)

    def of(self, slices: Sequence[Slice]) -> list[AllowedTokens | None]:
        """Computes the entries of `begin` in the calling thread. A failure of one slice does not affect the others."""
        self._num_steps += 1
        found = [self._allowed(piece) if piece.sampling.grammar else None for piece in slices]
        self._forget()
        return found

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    def _allowed(self, piece: Slice) -> AllowedTokens:
        generated = list(piece.token_ids[piece.num_prompt_tokens : piece.end])
        try:
            follower = self._follow(piece.request_id, piece.sampling.grammar, generated)
        except InvalidRequest as error:
            return AllowedTokens(mask=None, failure=error.message)
        mask = self._mask(follower.matcher)
        if follower.matcher.is_error():
            del self._followers[piece.request_id]
            why = follower.matcher.get_error().partition("\n")[0]
            return AllowedTokens(mask=None, failure=f"the grammar cannot be followed any further: {why}")
        for token_id in self._eos_token_ids:
            if token_id not in piece.sampling.stop_token_ids:  # it would not end this request
                mask[token_id] = False
        if not mask.any():
            return AllowedTokens(mask=None, failure="the answer is complete, and no stop token may end it")
        return AllowedTokens(mask=mask)

    def _follow(self, request_id: RequestId, grammar: str, generated: list[int]) -> _Follower:
        follower = self._followers.get(request_id)
        if follower is None or follower.grammar != grammar or generated[: len(follower.read)] != follower.read:
            matcher = self._grammars.new_matcher(grammar)
            follower = _Follower(matcher=matcher, grammar=grammar, used_in=self._num_steps)
            self._followers[request_id] = follower
        fresh = generated[len(follower.read) :]
        if fresh:
            follower.matcher.consume_tokens(fresh)  # a failure is kept in the matcher
        follower.read = generated
        follower.used_in = self._num_steps
        self._followers.move_to_end(request_id)
        return follower

    def _mask(self, matcher: "LLMatcher") -> Mask:
        words = np.empty(-(-self._vocab_size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def _forget(self) -> None:
        while self._followers:
            request_id, follower = next(iter(self._followers.items()))
            if self._num_steps - follower.used_in < _MAX_IDLE_STEPS:
                return
            del self._followers[request_id]
