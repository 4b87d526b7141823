"""A trace in the likeness of another: a bootstrap of whole conversations.

A *conversation* is all requests of the given trace that share a private block: turns of a session, questions about one
document, or one request. A block is *widely shared*, and not private, if it leads to many different continuations, such
as a system prompt. Conversations are drawn about as often as each other, near their own part of the trace, so that
cold start and drifting load carry over. Each draw gets new ids for its private blocks and keeps the widely shared ones.

A higher rate means more conversations at once, each with unchanged think times. Beyond its duration, the given trace
begins again with new conversations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from random import Random

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TraceRecord
from moonserve.traces.workload.generator import ArrivalSpec, arrival_times
from moonserve.traces.workload.prefix_tree import PrefixTree, prefix_tree
from moonserve.traces.workload.threads import BlockIds, WaitingThreads

MIN_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class FittedTrace:
    """All conversations in order of their beginnings. Their hash ids are blocks of the given trace's prefix tree."""

    conversations: Sequence[Sequence[TraceRecord]]
    widely_shared: Sequence[bool]  # by block
    gaps_s: Sequence[float]  # between all requests

    @property
    def duration_s(self) -> float:
        return sum(self.gaps_s)

    @property
    def num_requests(self) -> int:
        return len(self.gaps_s) + 1

    @property
    def rate(self) -> float:
        """Mean requests per second. `fit_trace` ensures that the duration is above 0."""
        return len(self.gaps_s) / self.duration_s


def fit_trace(records: Sequence[TraceRecord]) -> FittedTrace:
    """Returns the conversations of a trace. Raises ConfigError if it has too few requests or no duration."""
    if len(records) < MIN_REQUESTS:
        raise ConfigError(f"{len(records)} requests are too few to be like; a trace needs {MIN_REQUESTS}")
    if records[-1].arrived_s <= records[0].arrived_s:
        raise ConfigError("all requests come at once, so there is no rate to be like")
    tree = prefix_tree(records)
    shared = _widely_shared(tree)
    conversations: dict[tuple[bool, int], list[TraceRecord]] = {}
    for request, (record, visit) in enumerate(zip(records, tree.visits, strict=True)):
        # The private blocks of a conversation form a subtree, which its first one identifies.
        private = next((block for block in visit.blocks if not shared[block]), None)
        key = (False, request) if private is None else (True, private)
        turn = replace(record, hash_ids=visit.blocks, output_length=max(1, record.output_length))
        conversations.setdefault(key, []).append(turn)
    gaps_s = [later.arrived_s - earlier.arrived_s for earlier, later in pairwise(records)]
    return FittedTrace(list(conversations.values()), shared, gaps_s)


_MIN_CONTINUATIONS, _CONTINUATIONS_SHARE = 20, 0.002  # different next blocks; of all requests
_MIN_USES, _USES_SHARE = 100, 0.02  # a larger conversation is divided


def _widely_shared(tree: PrefixTree) -> list[bool]:
    """Returns for each block whether it, or one after it, has many different next blocks or very many uses."""
    before: list[int | None] = [None] * tree.num_blocks
    continuations = [0] * tree.num_blocks
    for visit in tree.visits:
        for earlier, block in pairwise(visit.blocks[max(0, visit.num_seen - 1) :]):
            before[block] = earlier
            continuations[earlier] += 1
    enough = max(_MIN_CONTINUATIONS, _CONTINUATIONS_SHARE * len(tree.visits))
    too_many = max(_MIN_USES, _USES_SHARE * len(tree.visits))
    shared = [n >= enough or uses >= too_many for n, uses in zip(continuations, tree.uses, strict=True)]
    # Blocks are numbered in order of appearance, so each one comes after the one before it in its chain.
    for block in reversed(range(tree.num_blocks)):
        earlier_block = before[block]
        if shared[block] and earlier_block is not None:
            shared[earlier_block] = True
    return shared


@dataclass(slots=True, eq=False)
class _Draw:
    """One draw of a conversation, and the new ids of its private blocks so far."""

    turns: Sequence[TraceRecord]
    began_s: float
    next_turn: int = 0
    ids: dict[int, int] = field(default_factory=dict)


def records_like(
    fit: FittedTrace, random: Random, *, rate: float = 1.0, arrivals: ArrivalSpec | None = None
) -> Iterator[TraceRecord]:
    """Yields endless records in order of time. `rate`: factor on requests per second. `arrivals` replaces the gaps of
    the given trace."""
    if arrivals is not None:
        rate = arrivals.rate / fit.rate
    times = arrival_times(arrivals, random) if arrivals else _times(fit.gaps_s, random, rate)
    drawn = _drawn(fit.conversations, random, rate)
    waiting: WaitingThreads[_Draw] = WaitingThreads()
    new_ids, shared_ids = BlockIds(), dict[int, int]()
    for at_s in times:
        draw = waiting.pop_due(at_s) or _Draw(next(drawn), at_s)
        turn = draw.turns[draw.next_turn]
        chain: list[int] = []
        for block in turn.hash_ids:
            ids = shared_ids if fit.widely_shared[block] else draw.ids
            if block not in ids:
                [ids[block]] = new_ids.extend((), 1)
            chain.append(ids[block])
        draw.next_turn += 1
        if draw.next_turn < len(draw.turns):
            offset_s = draw.turns[draw.next_turn].arrived_s - draw.turns[0].arrived_s
            waiting.add(draw, draw.began_s + offset_s)
        yield replace(turn, arrived_s=at_s, hash_ids=tuple(chain))


_BUFFER_SHARE = 0.04  # of all conversations
_MIN_BUFFER, _MAX_BUFFER = 50, 100_000


def _drawn(
    conversations: Sequence[Sequence[TraceRecord]], random: Random, rate: float
) -> Iterator[Sequence[TraceRecord]]:
    """Yields endless conversations. They pass, `rate` times each, through a buffer that shuffles them: the next takes
    the place of a random one. So all are used about equally often, which keeps means close for every seed."""
    size = min(max(_MIN_BUFFER, int(len(conversations) * rate * _BUFFER_SHARE)), _MAX_BUFFER)
    buffer: list[Sequence[TraceRecord]] = []
    copies = 0.0
    for conversation in cycle(conversations):
        copies += rate
        while copies >= 1:
            copies -= 1
            if len(buffer) < size:
                buffer.append(conversation)
                continue
            slot = random.randrange(size)
            yield buffer[slot]
            buffer[slot] = conversation


_GAPS_IN_A_ROW = 100  # preserves the rhythm of arrivals, such as ticks of a coarse clock


def _times(gaps_s: Sequence[float], random: Random, rate: float) -> Iterator[float]:
    """Yields endless arrival times from 0: runs of the given gaps, from near the same part of the trace."""
    at_s, place = 0.0, 0.0
    yield at_s
    while True:
        begin = int(place) + random.randrange(-_GAPS_IN_A_ROW, _GAPS_IN_A_ROW + 1)
        for gap in range(begin, begin + _GAPS_IN_A_ROW):
            at_s += gaps_s[gap % len(gaps_s)] / rate
            yield at_s
        place = (place + _GAPS_IN_A_ROW / rate) % len(gaps_s)
