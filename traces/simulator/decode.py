"""A decode machine: landings in flight, prompts that it computes itself, and the batch that both join. Pure.

It grants landings on demand like `decode_worker`: in order of arrival, as long as one free block per holder remains,
and not before every preempted sequence has its blocks back. Prompts share no blocks, and nothing is kept in stores or
admitted by predicted need (`engine.lookahead`). Does not know transfers or the duration of a landing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.step_time import StepBudget
from moonserve.traces.simulator.batch import Batch
from moonserve.traces.simulator.sequence import BlockPool, Finished, FirstToken, SequenceState
from moonserve.traces.simulator.shared_host import Slowdown
from moonserve.traces.simulator.spec import ModelProfile


class LandingGranted(NamedTuple):
    """The blocks of a prompt are reserved; its KV or its prefix may be sent."""

    request_id: str


DecodeOutcome = LandingGranted | FirstToken | Finished


class DecodeMachine:
    """A decode machine. Methods return their outcomes and all others until `now`. Call `advance` at `wake_at`."""

    def __init__(
        self,
        model: ModelProfile,
        block_size: int,
        chunk_tokens: int,
        slowdown: Callable[[int], Slowdown] | None = None,
        most_step_s: float = math.inf,
        budget: StepBudget | None = None,
    ) -> None:
        """`slowdown` and `budget`: see `Batch`. `most_step_s`: see `refuses`."""
        self._model = model
        self._most_step_s = most_step_s
        self._block_size = block_size
        self._blocks = BlockPool(model.device_tokens // block_size)
        self._batch = Batch(
            decode=model.decode,
            prefill=model.prefill,
            blocks=self._blocks,
            block_size=block_size,
            max_num_seqs=model.max_num_seqs,
            max_batched_tokens=max(chunk_tokens, model.max_num_seqs + 1),
            slowdown=slowdown,
            spread=model.crowding.gaps,
            budget=budget,
            num_landing=lambda: len(self._landings),
        )
        self._queue: dict[str, int] = {}  # request → prompt tokens, in order of arrival
        self._landings: dict[str, int] = {}  # request → blocks granted and not yet landed
        self._sequences: dict[str, SequenceState] = {}
        self._num_landed = 0

    @property
    def wake_at(self) -> float | None:
        return self._batch.wake_at

    @property
    def is_computing(self) -> bool:
        return self._batch.is_computing

    @property
    def num_running(self) -> int:
        return len(self._batch.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._batch.waiting)

    @property
    def num_blocks(self) -> int:
        return self._blocks.total

    @property
    def free_blocks(self) -> int:
        """Free blocks at the latest event. Blocks that running steps have grown into since then are not counted."""
        return self._blocks.free

    @property
    def leased_blocks(self) -> int:
        return sum(self._landings.values())

    @property
    def num_preemptions(self) -> int:
        return self._batch.num_preemptions

    def context_tokens(self, now: float) -> int:
        return self._batch.context_tokens(now)

    def would_miss_tbt(self, num_tokens: int, now: float) -> bool:
        """True if steps with another sequence of `num_tokens` tokens would take longer than `most_step_s`."""
        num_seqs = len(self._sequences) + 1
        tokens = self._batch.context_tokens(now) + num_tokens
        step_s = self._model.decode.batch_step_s(num_seqs, tokens, self._model.max_num_seqs)
        return step_s > self._most_step_s

    def advance(self, now: float) -> list[DecodeOutcome]:
        return [*self._advance(now), *self._grant(now)]

    def slowdown_changed(self, now: float) -> list[DecodeOutcome]:
        """Applies a changed slowdown to all steps after the one in flight."""
        outcomes = self.advance(now)
        if self.is_computing:
            self._batch.end_after_this_step(now)
        return outcomes

    def reserve(self, request_id: str, num_tokens: int, now: float) -> list[DecodeOutcome]:
        """Requests blocks for a prompt. Raises InvalidRequest if it can never fit."""
        if -(-(num_tokens + 1) // self._block_size) > self._blocks.total:
            raise InvalidRequest(f"{num_tokens} tokens never fit", request=request_id)
        outcomes = self._advance(now)
        self._queue[request_id] = num_tokens
        return [*outcomes, *self._grant(now)]

    def land(
        self, request_id: str, num_tokens: int, remaining: int, first_token_at: float, now: float
    ) -> list[DecodeOutcome]:
        """Adds a granted prompt whose KV has arrived. Its first token came elsewhere; `remaining` others follow."""
        sequence = SequenceState(
            request_id=request_id,
            tokens=num_tokens + 1,
            remaining=remaining,
            last_token_at=first_token_at,
        )
        return self._join(sequence, now)

    def read(self, request_id: str, num_tokens: int, cached: int, remaining: int, now: float) -> list[DecodeOutcome]:
        """Adds a granted prompt whose first `cached` tokens have arrived. The machine computes the rest. `remaining`:
        tokens to generate, including the first one."""
        sequence = SequenceState(
            request_id=request_id,
            tokens=num_tokens,
            remaining=remaining,
            num_uncomputed=num_tokens - cached,
            cached_tokens=cached,
        )
        return self._join(sequence, now)

    def _join(self, sequence: SequenceState, now: float) -> list[DecodeOutcome]:
        """Adds a granted prompt to the batch."""
        outcomes = self._advance(now)
        self._num_landed += 1
        sequence.rank = (0, self._num_landed)
        sequence.num_blocks = self._landings.pop(sequence.request_id)
        self._sequences[sequence.request_id] = sequence
        self._batch.add(sequence, now)
        return [*outcomes, *self._grant(now)]

    def gaps_so_far(self, request_id: str, now: float) -> list[float]:
        """Returns the times between the tokens that a landed request has so far; empty for any other request."""
        sequence = self._sequences.get(request_id)
        return [] if sequence is None else self._batch.gaps_so_far(sequence, now)

    def cancel(self, request_id: str, now: float) -> list[DecodeOutcome]:
        """Drops a request in any state. An unknown request has already ended."""
        outcomes = self._advance(now)
        self._queue.pop(request_id, None)
        num_landing = self._landings.pop(request_id, 0)
        self._blocks.release(num_landing)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._batch.remove(sequence, now)
        elif num_landing or not self.is_computing:
            self._batch.end_after_this_step(now)  # a sequence may be waiting for these blocks
        return [*outcomes, *self._grant(now)]

    def _advance(self, now: float) -> list[DecodeOutcome]:
        outcomes: list[DecodeOutcome] = []
        for outcome in self._batch.advance(now):
            if isinstance(outcome, Finished):
                self._sequences.pop(outcome.sequence.request_id, None)
            outcomes.append(outcome)
        return outcomes

    def _grant(self, now: float) -> list[LandingGranted]:
        granted: list[LandingGranted] = []
        if not self._queue or self._batch.has_preempted:
            return granted
        self._batch.allocate_grown_blocks(now)
        for request_id, num_tokens in list(self._queue.items()):
            num_blocks, needed = (-(-n // self._block_size) for n in (num_tokens, num_tokens + 1))
            num_holders = self._batch.num_holders
            if (needed if num_holders else num_blocks) + num_holders > self._blocks.free:
                break
            del self._queue[request_id]
            self._blocks.take(num_blocks)
            self._landings[request_id] = num_blocks
            granted.append(LandingGranted(request_id))
        self._batch.end_before_blocks_run_out(now)
        return granted

    def validate(self) -> None:
        """Raises AssertionError unless free + held + leased = all blocks and each request is in one place."""
        self._batch.validate()
        sequences = [*self._batch.running, *self._batch.waiting]
        held = sum(sequence.num_blocks for sequence in sequences)
        assert self._blocks.free + held + self.leased_blocks == self._blocks.total, "blocks leak"
        assert self._blocks.free >= 0
        live = {s.request_id for s in sequences if not s.is_cancelled}
        assert live == self._sequences.keys(), "a sequence is lost"
        assert not self._queue.keys() & self._landings.keys()
        assert not (self._queue.keys() | self._landings.keys()) & live
