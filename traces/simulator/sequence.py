"""A request during decode, as a batch sees it, and the block pool of its machine. Pure."""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from moonserve.protocol.kv_blocks import BlockKey

# Runs of steps whose durations are an arithmetic series, and the token gaps that follow from them. Pure arithmetic.
#
# While the members of a batch stay the same, every sequence grows by one token per step and the step time by a
# constant, so m steps need no m events. A request's gaps are read from its segments. Works on any numbers that can be
# added and divided (tests use fractions, which do not round).


class Segment(NamedTuple):
    """`num_steps` steps. The first takes `first_s`, each later one `growth_s` more than the one before."""

    num_steps: int
    first_s: float
    growth_s: float
    num_others: int = 0  # other machines that compute on the host

    def elapsed_s(self, num_steps: int) -> float:
        """Returns the seconds of the first `num_steps` steps."""
        return num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) // 2)

    @property
    def total_s(self) -> float:
        return self.elapsed_s(self.num_steps)

    def steps_within(self, seconds: float) -> int:
        """Returns the number of whole steps that end within `seconds`, at most `num_steps`."""
        if seconds >= self.total_s:
            return self.num_steps
        steps = min(max(self._solve(float(seconds)), 0), self.num_steps)
        while steps > 0 and self.elapsed_s(steps) > seconds:
            steps -= 1
        while steps < self.num_steps and self.elapsed_s(steps + 1) <= seconds:
            steps += 1
        return steps

    def _solve(self, seconds: float) -> int:
        """Estimates `steps_within`: the root of growth/2·m² + (first − growth/2)·m = seconds."""
        first, growth = float(self.first_s), float(self.growth_s)
        linear = first - growth / 2
        if growth <= 0.0:
            return int(seconds / first) if first > 0.0 else self.num_steps
        return int((math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth)

    def gaps_s(self) -> list[float]:
        """Returns the duration of each step."""
        first, growth = self.first_s, self.growth_s
        return [first + growth * step for step in range(self.num_steps)]


class TokenRun(NamedTuple):
    """Segments [begin, end) of a machine, in which a sequence gets a token from every step."""

    waited_s: float  # between its latest token and the first of these steps
    begin: int
    end: int


# Gap ÷ step time by the number of others; the last entry applies to more. Values have equal shares, shortest first.
GapSpread = Sequence[Sequence[float]]

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill the unit interval evenly, for any number of them


def gaps_of(runs: Sequence[TokenRun], segments: Sequence[Segment], spread: GapSpread = ()) -> list[float]:
    """Returns the times between a request's tokens, in order. With `spread`, tokens come as clients see them: sometimes
    several at once, sometimes after a pause. The arrival of the last token does not change."""
    gaps: list[float] = []
    waits: list[tuple[int, float]] = []
    for waited_s, begin, end in runs:
        first = len(gaps)
        for segment in segments[begin:end]:
            gaps += segment.gaps_s()
        if first < len(gaps):  # else its first step is still in flight
            waits.append((first, waited_s))
    if spread:
        others = [s.num_others for _, b, e in runs for s in segments[b:e] for _ in range(s.num_steps)]
        gaps = _spread_gaps(gaps, others, spread)
    for first, waited_s in waits:
        gaps[first] += waited_s
    return gaps


def _spread_gaps(gaps: Sequence[float], others: Sequence[int], spread: GapSpread) -> list[float]:
    """Spreads gaps in an order that depends only on the token's number: equal simulations have equal results."""
    spread_out: list[float] = []
    for number, (gap, num_others) in enumerate(zip(gaps, others, strict=True)):
        shares = spread[min(num_others, len(spread) - 1)]
        place = int((number * _GOLDEN + 0.5) % 1.0 * len(shares))
        spread_out.append(gap * shares[place])
    total = sum(spread_out)
    if not total:
        return list(gaps)
    stretch = sum(gaps) / total
    return [gap * stretch for gap in spread_out]


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState:
    """State as of the start of the segment in flight. A sequence waiting without blocks is preempted or not begun."""

    request_id: str
    rank: tuple[int, int] = (0, 0)  # the lower one runs first and is preempted last
    tokens: int  # of context, including the latest one
    remaining: int  # tokens to generate
    num_uncomputed: int = 1  # tokens without KV: 1 while decoding, more when computing the prompt (again)
    num_blocks: int = 0
    last_token_at: float | None = None  # None = no token yet
    keys: Sequence[BlockKey] = ()  # of the prompt's full blocks, if prefixes are cached
    cached_tokens: int = 0  # of the prompt, when it started
    prefill_s: float = 0.0  # duration of the steps that compute it, until its first token
    begun_at: float | None = None  # None = not in any step yet
    runs: list[TokenRun] = field(default_factory=list)  # closed runs
    run_from: int | None = None  # first segment of the open run; None = it gets no tokens now
    run_waited_s: float = 0.0  # of the open run
    sampled_in: int = -1  # latest segment that gives it tokens; -1 = none
    is_cancelled: bool = False  # cancelled during a step


class FirstToken(NamedTuple):
    """A sequence got its first token here."""

    sequence: SequenceState
    at: float


class Finished(NamedTuple):
    """A sequence got its last token. `gaps_s`: times between its tokens, including that before its first one here."""

    sequence: SequenceState
    at: float
    gaps_s: list[float]


SequenceOutcome = FirstToken | Finished


class BlockPool:
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

    def release(self, num_blocks: int) -> None:
        assert num_blocks <= self._held
        self._held -= num_blocks

    def allocate_prompt(self, sequence: SequenceState, num_blocks: int, headroom: int) -> bool:
        """Gives a sequence `num_blocks` blocks if `headroom` stay free. Sets its `num_uncomputed`."""
        if num_blocks + headroom > self.free:
            return False
        self.grow(sequence, num_blocks)
        sequence.num_uncomputed = sequence.tokens
        return True

    def grow(self, sequence: SequenceState, num_blocks: int) -> None:
        """Gives a sequence `num_blocks` more blocks, which must be free."""
        self.take(num_blocks)
        sequence.num_blocks += num_blocks

    def prompt_computed(self, sequence: SequenceState) -> None:
        """Called when all KV of the sequence is computed."""

    def release_sequence(self, sequence: SequenceState) -> None:
        """Takes back all blocks of a sequence."""
        self.release(sequence.num_blocks)
        sequence.num_blocks = 0


class PrefixCachingBlockPool(BlockPool):
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

    def allocate_prompt(self, sequence: SequenceState, num_blocks: int, headroom: int) -> bool:
        usable = (sequence.tokens - 1) // self._block_size  # the last token is always computed
        found = self._cached_prefix(sequence.keys[:usable])
        # Idle blocks among those found are no longer free once they are held.
        taken = num_blocks - sum(key in self._references for key in found)
        if taken + headroom > self.free:
            return False
        for key in found:
            self._reference(key)
        self._shared[sequence.request_id] = found
        sequence.num_blocks = len(found)
        self.grow(sequence, num_blocks - len(found))
        sequence.num_uncomputed = sequence.tokens - len(found) * self._block_size
        if sequence.begun_at is None:
            sequence.cached_tokens = len(found) * self._block_size
        return True

    def take(self, num_blocks: int) -> None:
        super().take(num_blocks)
        while len(self._idle) > self.free:
            self._idle.popitem(last=False)

    def prompt_computed(self, sequence: SequenceState) -> None:
        """Makes the full prompt blocks findable. A block that another sequence has computed meanwhile is given back."""
        shared = self._shared.get(sequence.request_id, ())
        new = sequence.keys[len(shared) :]
        for key in new:
            if key in self._references or key in self._idle:
                self._reference(key)
                self.release(1)
            else:
                self._references[key] = 1
        self._shared[sequence.request_id] = (*shared, *new)

    def release_sequence(self, sequence: SequenceState) -> None:
        shared = self._shared.pop(sequence.request_id, ())
        self.release(sequence.num_blocks - len(shared))
        for key in reversed(shared):
            self._references[key] -= 1
            if not self._references[key]:
                del self._references[key]
                self._idle[key] = None
                self.release(1)
        sequence.num_blocks = 0

    def _cached_prefix(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        return tuple(takewhile(lambda key: key in self._references or key in self._idle, keys))

    def _reference(self, key: BlockKey) -> None:
        if key in self._references:
            self._references[key] += 1
            return
        del self._idle[key]
        self._references[key] = 1
        super().take(1)

    def validate(self, sequences: Sequence[SequenceState]) -> None:
        """Raises AssertionError unless the references match the holders and no block is counted twice."""
        held = [key for sequence in sequences for key in self._shared.get(sequence.request_id, ())]
        assert Counter(held) == self._references
        assert not self._references.keys() & self._idle.keys()
        assert len(self._idle) <= self.free
        own = sum(s.num_blocks - len(self._shared.get(s.request_id, ())) for s in sequences)
        assert own + len(self._references) == self.total - self.free, "blocks leak"
