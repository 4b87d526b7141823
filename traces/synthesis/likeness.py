"""A trace in the likeness of another: each request takes its figures from a given one and finds its own prefix.

A request takes lengths and reuse of one donor. It begins with the widely shared prefix that the donor had, or beyond it
with the earlier prompt of *this* trace that comes closest to what the donor began with: as many blocks, last used as
long ago, as popular, as late in its session, extended or left midway. So sums of reused and new blocks, times between
uses and popularity carry over, and no prompt does. The denser the traffic, the closer the match.

A *donor* is one request of the given trace, reduced to lengths, the gap before it, which of the widely shared prefixes
it begins with, and how it reuses beyond that: how many leading blocks, how long after their last use, how popular the
deepest of them was, and how much of the earlier prompt it left. No ids, and no order of blocks.

More requests per second mean more users, who think as long as before. Knows the fit only, never the given trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from protocol.errors import ConfigError
from traces.analysis.measures import turn_numbers
from traces.analysis.prefixes import Visit, prefix_tree
from traces.format import TOKENS_PER_HASH, TraceRecord
from traces.synthesis.past import REMEMBERED, Past, Prompt, Wish
from traces.synthesis.trunks import BlockIds, Chain, Trunk, TrunkChains, TrunkKey, trunks_of
from traces.synthesis.workload import ArrivalSpec, arrival_times

MIN_REQUESTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """How a request begins with an earlier one's blocks."""

    blocks: int  # leading ones, at least 1
    after_s: float  # since the last use of the deepest one
    uses: int  # of the deepest one, so far; 1: nobody but the earlier request has it
    left: int  # whole blocks of the earlier prompt behind them
    repeats: bool  # the earlier prompt once more, its partial last block included


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """One request of the given trace."""

    arrived_s: float
    gap_s: float  # since the request before
    input_length: int
    output_length: int
    turn: int  # in its session, as `traces.analysis.measures` counts; 1: extends no earlier prompt
    trunk: Trunk
    reuse: Reuse | None  # that goes deeper than the trunk


@dataclass(frozen=True, slots=True)
class Fit:
    """All donors in the order of time."""

    donors: Sequence[Donor]

    @property
    def duration_s(self) -> float:
        return self.donors[-1].arrived_s

    @property
    def longest_input(self) -> int:
        """In tokens."""
        return max(donor.input_length for donor in self.donors)

    @property
    def rate(self) -> float:
        """Mean requests per second; `fit` has made sure that time passes."""
        return (len(self.donors) - 1) / self.duration_s


def fit(records: Sequence[TraceRecord]) -> Fit:
    """Raises ConfigError when there is too little to learn from."""
    if len(records) < MIN_REQUESTS:
        raise ConfigError(f"{len(records)} requests are too few to be like; a trace needs {MIN_REQUESTS}")
    if records[-1].arrived_s <= records[0].arrived_s:
        raise ConfigError("all requests come at once, so there is no rate to be like")
    tree = prefix_tree(records)
    turns = turn_numbers(tree, records)
    trunks = trunks_of(tree, records, turns)
    uses = [0] * tree.num_blocks
    donors: list[Donor] = []
    for request, record in enumerate(records):
        visit, trunk = tree.visits[request], trunks[request]
        reuse = _reuse(record, visit, records, uses)
        donors.append(
            Donor(
                arrived_s=record.arrived_s - records[0].arrived_s,
                gap_s=record.arrived_s - records[max(0, request - 1)].arrived_s,
                input_length=record.input_length,
                output_length=record.output_length,
                turn=turns[request],
                trunk=trunk,
                reuse=reuse if reuse and reuse.blocks > len(trunk.path) else None,
            )
        )
        for block in visit.blocks:
            uses[block] += 1
    return Fit(donors)


def _reuse(record: TraceRecord, visit: Visit, records: Sequence[TraceRecord], uses: Sequence[int]) -> Reuse | None:
    """Whole blocks only, unless the prompt repeats an earlier one to its end. `uses`: of each block, before this."""
    if not visit.runs:
        return None
    earlier = records[visit.runs[-1].last_request]
    repeats = visit.num_seen == len(visit.blocks) == len(earlier.hash_ids)
    earlier_whole = earlier.input_length // earlier.tokens_per_hash
    whole = min(record.input_length // record.tokens_per_hash, earlier_whole)
    blocks = visit.num_seen if repeats else min(visit.num_seen, whole)
    if not blocks:
        return None
    return Reuse(
        blocks=blocks,
        after_s=record.arrived_s - earlier.arrived_s,
        uses=uses[visit.blocks[blocks - 1]],
        left=max(0, earlier_whole - blocks),
        repeats=repeats,
    )


_BUFFER_SHARE = 0.04  # of all donors
_MIN_BUFFER = 50
_TRIES = 8  # draws for a donor whose reuse has happened already
_GAPS_IN_A_ROW = 100  # arrivals keep their rhythm, such as ticks of a coarse clock


class DonorStream:
    """Donors without end, in the order in which they lend their figures.

    Donors pass through a buffer that shuffles them: one is drawn at random, the next of the trace takes its place. So
    all are used equally often, which keeps means and percentiles close for every seed, and each near its own part of
    the trace, whose cold start and drifting load are part of its figures. Behind the end comes the second half again,
    shuffled anew: what a stretched trace is to go on like. `rate`: requests drawn per request of the given trace.
    """

    def __init__(self, fit: Fit, random: Random, rate: float) -> None:
        self._donors, self._random = fit.donors, random
        self._per_draw = 1 / rate
        size = min(len(fit.donors), max(_MIN_BUFFER, int(len(fit.donors) * _BUFFER_SHARE)))
        self._buffer = [(donor, 0) for donor in fit.donors[:size]]
        self._next = size
        self._round = 0
        self._due = 0.0  # donors to take in

    @property
    def place(self) -> int:
        """Index of the donor in the middle of the buffer."""
        return max(0, self._next - len(self._buffer) // 2) % len(self._donors)

    def draw(self, at_s: float) -> tuple[Donor, int]:
        """A donor for a request at `at_s`, and how often the given trace had come round when it joined.

        One whose reuse is older than the trace waits, if there are others.
        """
        slot = self._random.randrange(len(self._buffer))
        for _ in range(_TRIES):
            reuse = self._buffer[slot][0].reuse
            if reuse is None or reuse.after_s <= at_s:
                break
            slot = self._random.randrange(len(self._buffer))
        drawn = self._buffer[slot]
        self._due += self._per_draw
        while self._due >= 1:
            self._due -= 1
            self._buffer[slot] = self._following()
            slot = self._random.randrange(len(self._buffer))
        return drawn

    def _following(self) -> tuple[Donor, int]:
        if self._next == len(self._donors):
            self._next = len(self._donors) // 2
            self._round += 1
        self._next += 1
        return self._donors[self._next - 1], self._round


class GapStream:
    """Seconds between arrivals without end: rows of the given trace's gaps, from near where the donors come from."""

    def __init__(self, fit: Fit, random: Random, rate: float, donors: DonorStream) -> None:
        self._fit, self._random, self._rate, self._donors = fit, random, rate, donors
        self._place = 1
        self._left = 0

    def draw(self) -> float:
        """Raises nothing; the first donor has no gap and is left out."""
        last = len(self._fit.donors) - 1
        if not self._left:
            near = self._random.randrange(-_GAPS_IN_A_ROW, _GAPS_IN_A_ROW + 1)
            self._place = min(max(1, self._donors.place + near), last)
            self._left = _GAPS_IN_A_ROW
        gap_s = self._fit.donors[self._place].gap_s / self._rate
        self._left -= 1
        self._place = self._place + 1 if self._place < last else max(1, last // 2)
        return gap_s


def records_like(
    fit: Fit,
    random: Random,
    *,
    rate: float = 1.0,
    arrivals: ArrivalSpec | None = None,
    remembered: int = REMEMBERED,
) -> Iterator[TraceRecord]:
    """Records in the order of time, without end. `rate`: factor on requests per second. `arrivals`: instead of the
    gaps of the given trace."""
    if arrivals is not None:
        rate = arrivals.rate / fit.rate
    donors = DonorStream(fit, random, rate)
    gaps = GapStream(fit, random, rate, donors)
    times = arrival_times(arrivals, random) if arrivals else _times(gaps)
    likeness = _Likeness(fit.longest_input, Past(remembered))
    for at_s in times:
        donor, round_number = donors.draw(at_s)
        yield likeness.request(donor, round_number, at_s)


def _times(gaps: GapStream) -> Iterator[float]:
    at_s = 0.0
    while True:
        yield at_s
        at_s += gaps.draw()


class _Likeness:
    def __init__(self, longest: int, past: Past) -> None:
        self._longest, self._past = longest, past
        self._ids = BlockIds()
        self._trunks = TrunkChains(self._ids)

    def request(self, donor: Donor, round_number: int, at_s: float) -> TraceRecord:
        prompt = self._prompt(donor, round_number, at_s)
        self._past.add(prompt)
        return TraceRecord(
            arrived_s=at_s,
            input_length=prompt.input_length,
            output_length=max(1, donor.output_length),
            hash_ids=prompt.chain,
        )

    def _prompt(self, donor: Donor, round_number: int, at_s: float) -> Prompt:
        length = donor.input_length
        trunk = self._trunks.chain(donor.trunk, length // TOKENS_PER_HASH, round_number)
        key = self._trunks.key(donor.trunk, round_number)
        wish = self._wish(donor, key, length, at_s)
        if wish is not None and wish.blocks > len(trunk):
            extended = self._past.session(wish) if wish.turn and not wish.left else None
            joined = self._past.popular(wish) if not extended and wish.uses > 1 else None
            earlier = extended or joined or self._past.private(wish)
            if earlier is not None:
                depth = wish.blocks if joined else wish.depth(earlier)
                return self._continued(earlier, depth, donor, wish, length)
        return self._made(trunk, key, length, at_s)

    def _wish(self, donor: Donor, key: TrunkKey, length: int, at_s: float) -> Wish | None:
        """What the donor's reuse is here; None when it has none."""
        reuse = donor.reuse
        room = length // TOKENS_PER_HASH
        if reuse is None or not room:
            return None
        blocks = min(room, reuse.blocks)
        return Wish(
            trunk=key,
            blocks=blocks,
            most=blocks + (self._longest - length) // TOKENS_PER_HASH,
            left=reuse.left,
            arrived_s=at_s - reuse.after_s,
            now_s=at_s,
            turn=donor.turn - 1,
            uses=reuse.uses,
        )

    def _continued(self, earlier: Prompt, depth: int, donor: Donor, wish: Wish, length: int) -> Prompt:
        """A prompt that begins with `depth` blocks of the earlier one."""
        turn = earlier.turn + 1 if wish.turn else 1
        uses = earlier.uses + 1 if depth <= earlier.shared else 2
        if donor.reuse is not None and donor.reuse.repeats:
            return _again(earlier, uses, turn, wish.now_s)
        earlier.taken = max(earlier.taken, depth)
        # Longer or shorter by what the earlier prompt is, so that the new part keeps its length.
        length += (depth - wish.blocks) * TOKENS_PER_HASH
        return self._made(earlier.chain[:depth], wish.trunk, length, wish.now_s, uses, turn)

    def _made(self, base: Chain, trunk: TrunkKey, length: int, at_s: float, uses: int = 1, turn: int = 1) -> Prompt:
        """A prompt of `length` tokens that begins with `base` and is new behind it."""
        num_new = -(-length // TOKENS_PER_HASH) - len(base)
        return Prompt(
            arrived_s=at_s,
            chain=self._ids.extend(base, num_new),
            input_length=length,
            whole=length // TOKENS_PER_HASH,
            shared=len(base),
            uses=uses,
            trunk=trunk,
            turn=turn,
        )


def _again(earlier: Prompt, uses: int, turn: int, at_s: float) -> Prompt:
    """The same prompt once more. Its partial last block is shared too, and nothing can follow that."""
    earlier.taken = earlier.whole
    return Prompt(
        arrived_s=at_s,
        chain=earlier.chain,
        input_length=earlier.input_length,
        whole=earlier.whole,
        shared=earlier.whole,
        uses=uses,
        trunk=earlier.trunk,
        turn=turn,
    )
