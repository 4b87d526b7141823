"""A request during decode, as a batch sees it, and the block pool of its machine. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.keys import BlockKey
from traces.simulator.segments import Run


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State as of the start of the segment in flight. A sequence waiting without blocks is preempted or not begun."""

    request_id: str
    rank: tuple[int, int] = (0, 0)  # the lower one runs first and is preempted last
    tokens: int  # of context, including the latest one
    remaining: int  # tokens to generate
    missing: int = 1  # tokens without KV: 1 while decoding, more when computing the prompt (again)
    num_blocks: int = 0
    last_token_at: float | None = None  # None = no token yet
    keys: Seq[BlockKey] = ()  # of the prompt's full blocks, if prefixes are cached
    cached_tokens: int = 0  # of the prompt, when it started
    prefill_s: float = 0.0  # duration of the steps that compute it, until its first token
    begun_at: float | None = None  # None = not in any step yet
    runs: list[Run] = field(default_factory=list)  # closed runs
    run_from: int | None = None  # first segment of the open run; None = it gets no tokens now
    run_waited_s: float = 0.0  # of the open run
    sampled_in: int = -1  # latest segment that gives it tokens; -1 = none
    gone: bool = False  # cancelled during a step


class Sampled(NamedTuple):
    """A sequence got its first token here."""

    sequence: Sequence
    at: float


class Finished(NamedTuple):
    """A sequence got its last token. `gaps_s`: times between its tokens, including that before its first one here."""

    sequence: Sequence
    at: float
    gaps_s: list[float]


Outcome = Sampled | Finished


class CountedBlocks:
    """The blocks of a batch, as numbers only. No prefix is shared."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held = 0

    @property
    def free(self) -> int:
        """Blocks available now, including those that only hold cached prefixes."""
        return self.total - self._held

    def take(self, num_blocks: int) -> None:
        """Takes free blocks for a request that has no sequence yet."""
        assert num_blocks <= self.free, "blocks are given twice"
        self._held += num_blocks

    def give_back(self, num_blocks: int) -> None:
        assert num_blocks <= self._held
        self._held -= num_blocks

    def restore(self, sequence: Sequence, num_blocks: int, headroom: int) -> bool:
        """Gives a sequence `num_blocks` blocks if `headroom` stay free. Sets `missing` to the tokens to compute."""
        if num_blocks + headroom > self.free:
            return False
        self.grow(sequence, num_blocks)
        sequence.missing = sequence.tokens
        return True

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        """Gives a sequence `num_blocks` more blocks, which must be free."""
        self.take(num_blocks)
        sequence.num_blocks += num_blocks

    def computed(self, sequence: Sequence) -> None:
        """Called when all KV of the sequence is computed."""

    def end(self, sequence: Sequence) -> None:
        """Takes back all blocks of a sequence."""
        self.give_back(sequence.num_blocks)
        sequence.num_blocks = 0


class CachedBlocks(CountedBlocks):
    """A device's block pool with a prefix cache, like vLLM's: blocks of finished prompts stay until space is needed.

    Blocks of a computed prompt get its keys. A later sequence with the same prefix shares them. A block that no
    sequence holds stays findable and counts as free. The least recently released is evicted first, and of a prompt the
    last block first.
    """

    def __init__(self, total: int, block_size: int) -> None:
        super().__init__(total)
        self._block_size = block_size
        self._references: dict[BlockKey, int] = {}  # number of sequences that hold each block
        self._idle: OrderedDict[BlockKey, None] = OrderedDict()  # blocks without a holder, next to evict first
        self._shared: dict[str, tuple[BlockKey, ...]] = {}  # request → keyed blocks that it holds

    def restore(self, sequence: Sequence, num_blocks: int, headroom: int) -> bool:
        usable = (sequence.tokens - 1) // self._block_size  # the last token is always computed
        found = self._leading(sequence.keys[:usable])
        # Idle blocks among those found are no longer free once they are held.
        taken = num_blocks - sum(key in self._references for key in found)
        if taken + headroom > self.free:
            return False
        for key in found:
            self._hold(key)
        self._shared[sequence.request_id] = found
        sequence.num_blocks = len(found)
        self.grow(sequence, num_blocks - len(found))
        sequence.missing = sequence.tokens - len(found) * self._block_size
        if sequence.begun_at is None:
            sequence.cached_tokens = len(found) * self._block_size
        return True

    def take(self, num_blocks: int) -> None:
        super().take(num_blocks)
        while len(self._idle) > self.free:
            self._idle.popitem(last=False)

    def computed(self, sequence: Sequence) -> None:
        """Makes the full prompt blocks findable. A block that another sequence has computed meanwhile is given back."""
        shared = self._shared.get(sequence.request_id, ())
        new = sequence.keys[len(shared) :]
        for key in new:
            if key in self._references or key in self._idle:
                self._hold(key)
                self.give_back(1)
            else:
                self._references[key] = 1
        self._shared[sequence.request_id] = (*shared, *new)

    def end(self, sequence: Sequence) -> None:
        shared = self._shared.pop(sequence.request_id, ())
        self.give_back(sequence.num_blocks - len(shared))
        for key in reversed(shared):
            self._references[key] -= 1
            if not self._references[key]:
                del self._references[key]
                self._idle[key] = None
                self.give_back(1)
        sequence.num_blocks = 0

    def _leading(self, keys: Seq[BlockKey]) -> tuple[BlockKey, ...]:
        found: list[BlockKey] = []
        for key in keys:
            if key not in self._references and key not in self._idle:
                break
            found.append(key)
        return tuple(found)

    def _hold(self, key: BlockKey) -> None:
        if key in self._references:
            self._references[key] += 1
            return
        del self._idle[key]
        self._references[key] = 1
        super().take(1)

    def validate(self, sequences: Seq[Sequence]) -> None:
        """Raises AssertionError unless the references match the holders and no block is counted twice."""
        held = [key for sequence in sequences for key in self._shared.get(sequence.request_id, ())]
        assert Counter(held) == self._references
        assert not self._references.keys() & self._idle.keys()
        assert len(self._idle) <= self.free
        own = sum(s.num_blocks - len(self._shared.get(s.request_id, ())) for s in sequences)
        assert own + len(self._references) == self.total - self.free, "blocks leak"
