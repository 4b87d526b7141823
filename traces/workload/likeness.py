"""A trace in the likeness of another: each request takes its figures from a given one and finds its own prefix.

A request takes lengths and reuse of one donor. It begins with the donor's widely shared prefix. If the donor reuses
more, it begins with the earlier prompt of *this* trace that is closest to what the donor began with: as many blocks, as
long after their last use, as popular, as late in the session, extended or left midway. So sums of reused and new
blocks, times between uses and popularity carry over, but no prompt does. Denser traffic gives a closer match.

A *donor* is one request of the given trace, reduced to lengths, the gap before it, the widely shared prefix that it
begins with, and its reuse beyond: number of leading blocks, time since their last use, popularity of the deepest one,
and the rest of the earlier prompt. It has no ids and no order of blocks.

A higher rate means more users, each with unchanged think times. Knows only the fit, not the given trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord
from moonserve.traces.workload.generator import ArrivalSpec, arrival_times
from moonserve.traces.workload.prefix_reuse import (
    MAX_PROMPTS,
    BlockIds,
    Chain,
    Prompt,
    PromptHistory,
    ReuseTarget,
    SharedPrefix,
    SharedPrefixChains,
    SharedPrefixKey,
    shared_prefixes_of,
)
from moonserve.traces.workload.prefix_tree import Visit, prefix_tree
from moonserve.traces.workload.statistics import turn_numbers

MIN_REQUESTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """A request's reuse of an earlier request's blocks."""

    blocks: int  # leading blocks, at least 1
    after_s: float  # time since the last use of the deepest block
    uses: int  # uses of the deepest block so far; 1 = only by the earlier request
    left: int  # whole blocks of the earlier prompt after them
    repeats: bool  # True if the earlier prompt is repeated, including its partial last block


@dataclass(frozen=True, slots=True, kw_only=True)
class Donor:
    """One request of the given trace."""

    arrived_s: float
    gap_s: float  # since the request before
    input_length: int
    output_length: int
    turn: int  # in its session, as counted by `traces.workload.statistics`; 1 = extends no earlier prompt
    prefix: SharedPrefix
    reuse: Reuse | None  # None unless deeper than the prefix


@dataclass(frozen=True, slots=True)
class FittedTrace:
    """All donors in order of time."""

    donors: Sequence[Donor]

    @property
    def duration_s(self) -> float:
        return self.donors[-1].arrived_s

    @property
    def longest_input(self) -> int:
        """The longest prompt in tokens."""
        return max(donor.input_length for donor in self.donors)

    @property
    def rate(self) -> float:
        """Mean requests per second. `fit` ensures that the duration is above 0."""
        return (len(self.donors) - 1) / self.duration_s


def fit_trace(records: Sequence[TraceRecord]) -> FittedTrace:
    """Returns the donors of a trace. Raises ConfigError if it has too few requests or no duration."""
    if len(records) < MIN_REQUESTS:
        raise ConfigError(f"{len(records)} requests are too few to be like; a trace needs {MIN_REQUESTS}")
    if records[-1].arrived_s <= records[0].arrived_s:
        raise ConfigError("all requests come at once, so there is no rate to be like")
    tree = prefix_tree(records)
    turns = turn_numbers(tree, records)
    prefixes = shared_prefixes_of(tree, records, turns)
    uses = [0] * tree.num_blocks
    donors: list[Donor] = []
    for request, record in enumerate(records):
        visit, prefix = tree.visits[request], prefixes[request]
        reuse = _reuse(record, visit, records, uses)
        donors.append(
            Donor(
                arrived_s=record.arrived_s - records[0].arrived_s,
                gap_s=record.arrived_s - records[max(0, request - 1)].arrived_s,
                input_length=record.input_length,
                output_length=record.output_length,
                turn=turns[request],
                prefix=prefix,
                reuse=reuse if reuse and reuse.blocks > len(prefix.path) else None,
            )
        )
        for block in visit.blocks:
            uses[block] += 1
    return FittedTrace(donors)


def _reuse(record: TraceRecord, visit: Visit, records: Sequence[TraceRecord], uses: Sequence[int]) -> Reuse | None:
    """Returns a request's reuse, in whole blocks unless it repeats an earlier prompt. `uses`: per block, before it."""
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
_TRIES = 8  # maximum draws to find a donor whose reuse is possible
_GAPS_IN_A_ROW = 100  # preserves the rhythm of arrivals, such as ticks of a coarse clock


class DonorStream:
    """An endless stream of donors, in the order of their use.

    Donors pass through a buffer that shuffles them: one is drawn at random, and the next of the trace takes its place.
    So all are used equally often, which keeps means and percentiles close for every seed. Each is used near its own
    part of the trace, so that cold start and drifting load carry over. After the end, the second half is repeated in a
    new order, because a stretched trace should continue like it. `rate`: requests drawn per request of the given trace.
    """

    def __init__(self, fit: FittedTrace, random: Random, rate: float) -> None:
        self._donors, self._random = fit.donors, random
        self._per_draw = 1 / rate
        size = min(len(fit.donors), max(_MIN_BUFFER, int(len(fit.donors) * _BUFFER_SHARE)))
        self._buffer = [(donor, 0) for donor in fit.donors[:size]]
        self._next = size
        self._round = 0
        self._due = 0.0  # number of donors to take in

    @property
    def place(self) -> int:
        """Index of the donor in the middle of the buffer."""
        return max(0, self._next - len(self._buffer) // 2) % len(self._donors)

    def draw(self, at_s: float) -> tuple[Donor, int]:
        """Returns a donor for a request at `at_s`, and the round of the given trace in which it joined.

        A donor whose reuse is older than the new trace waits, if there are others.
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


def records_like(
    fit: FittedTrace,
    random: Random,
    *,
    rate: float = 1.0,
    arrivals: ArrivalSpec | None = None,
    remembered: int = MAX_PROMPTS,
) -> Iterator[TraceRecord]:
    """Yields endless records in order of time. `rate`: factor on requests per second. `arrivals` replaces the gaps of
    the given trace."""
    if arrivals is not None:
        rate = arrivals.rate / fit.rate
    donors = DonorStream(fit, random, rate)
    times = arrival_times(arrivals, random) if arrivals else _times(fit, random, rate, donors)
    likeness = _PromptMaker(fit.longest_input, PromptHistory(remembered))
    for at_s in times:
        donor, round_number = donors.draw(at_s)
        yield likeness.request(donor, round_number, at_s)


def _times(fit: FittedTrace, random: Random, rate: float, donors: DonorStream) -> Iterator[float]:
    """Yields endless arrival times from 0: runs of the given trace's gaps, from near the current donors. The first
    donor's gap is left out, because it is none."""
    at_s, last = 0.0, len(fit.donors) - 1
    yield at_s
    while True:
        near = random.randrange(-_GAPS_IN_A_ROW, _GAPS_IN_A_ROW + 1)
        place = min(max(1, donors.place + near), last)
        for _ in range(_GAPS_IN_A_ROW):
            at_s += fit.donors[place].gap_s / rate
            place = place + 1 if place < last else max(1, last // 2)
            yield at_s


class _PromptMaker:
    def __init__(self, longest: int, past: PromptHistory) -> None:
        self._longest, self._past = longest, past
        self._ids = BlockIds()
        self._shared_prefixes = SharedPrefixChains(self._ids)

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
        prefix = self._shared_prefixes.chain(donor.prefix, length // TOKENS_PER_HASH, round_number)
        key = self._shared_prefixes.key(donor.prefix, round_number)
        target = self._reuse_target(donor, key, length, at_s)
        if target is not None and target.blocks > len(prefix):
            extended = self._past.session(target) if target.turn and not target.left else None
            joined = self._past.popular(target) if not extended and target.uses > 1 else None
            earlier = extended or joined or self._past.private(target)
            if earlier is not None:
                depth = target.blocks if joined else target.depth(earlier)
                return self._continue_prompt(earlier, depth, donor, target, length)
        return self._new_prompt(prefix, key, length, at_s)

    def _reuse_target(self, donor: Donor, key: SharedPrefixKey, length: int, at_s: float) -> ReuseTarget | None:
        """Returns the donor's reuse as a target in this trace; None if there is no reuse."""
        reuse = donor.reuse
        room = length // TOKENS_PER_HASH
        if reuse is None or not room:
            return None
        blocks = min(room, reuse.blocks)
        return ReuseTarget(
            prefix=key,
            blocks=blocks,
            most=blocks + (self._longest - length) // TOKENS_PER_HASH,
            left=reuse.left,
            arrived_s=at_s - reuse.after_s,
            now_s=at_s,
            turn=donor.turn - 1,
            uses=reuse.uses,
        )

    def _continue_prompt(self, earlier: Prompt, depth: int, donor: Donor, target: ReuseTarget, length: int) -> Prompt:
        """Returns a prompt that begins with `depth` blocks of the earlier one."""
        turn = earlier.turn + 1 if target.turn else 1
        uses = earlier.uses + 1 if depth <= earlier.shared else 2
        if donor.reuse is not None and donor.reuse.repeats:
            earlier.taken = earlier.whole  # the partial last block is shared too, so no block can follow
            return replace(earlier, arrived_s=target.now_s, shared=earlier.whole, uses=uses, turn=turn, taken=0)
        earlier.taken = max(earlier.taken, depth)
        # The length follows the earlier prompt's, so that the new part keeps its length.
        length += (depth - target.blocks) * TOKENS_PER_HASH
        return self._new_prompt(earlier.chain[:depth], target.prefix, length, target.now_s, uses, turn)

    def _new_prompt(
        self, base: Chain, prefix: SharedPrefixKey, length: int, at_s: float, uses: int = 1, turn: int = 1
    ) -> Prompt:
        """Returns a prompt of `length` tokens that begins with `base` and is new after it."""
        num_new = -(-length // TOKENS_PER_HASH) - len(base)
        return Prompt(
            arrived_s=at_s,
            chain=self._ids.extend(base, num_new),
            input_length=length,
            whole=length // TOKENS_PER_HASH,
            shared=len(base),
            uses=uses,
            prefix=prefix,
            turn=turn,
        )
