"""The hash ids of a growing trace: allocation of ids, chains of them, and prefixes that many sessions share.

Ids are allocated in the order in which they are written, so they are dense and the neighbours of a new block are its
chain. Rule of the format: an id always follows the same id. So a chain consists of the head of another one and new ids.

A *shared prefix* is the leading part of a prompt, such as a system prompt, with which a minimum of sessions begins.
Each request keeps its shared prefix, so that these keep their length and popularity, and requests that share one share
it again. A prefix that the given trace uses for less than half of its time is not *permanent*: when a stretched trace
starts a new round of the given one, it gets new ids.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from moonserve.traces.format import TraceRecord
from moonserve.traces.workload.prefix_tree import PrefixTree

Chain = tuple[int, ...]  # the ids of a prompt, from the head on


class BlockIds:
    """Allocates ids from 0 up."""

    def __init__(self) -> None:
        self._next = 0

    def extend(self, chain: Chain, count: int) -> Chain:
        """Returns the chain extended by `count` new ids."""
        self._next += count
        return (*chain, *range(self._next - count, self._next))


_MIN_SESSIONS = 10
_MIN_SHARE = 0.002  # of all requests
_PERMANENT_SHARE = 0.5  # of the trace's duration, from first to last use


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`path`: its blocks, as the given trace's tree numbers them. The first `permanent` are permanent."""

    path: tuple[int, ...]
    permanent: int


NO_SHARED_PREFIX = SharedPrefix((), 0)


def shared_prefixes_of(tree: PrefixTree, records: Sequence[TraceRecord], turns: Sequence[int]) -> list[SharedPrefix]:
    """Returns each request's deepest shared prefix, in whole blocks. `turns`: each request's number in its session."""
    popular = _popular_blocks(tree, records, turns)
    span_s = (records[-1].arrived_s - records[0].arrived_s) * _PERMANENT_SHARE
    known: dict[int, SharedPrefix] = {}
    prefixes: list[SharedPrefix] = []
    for record, visit in zip(records, tree.visits, strict=True):
        whole = visit.blocks[: record.input_length // record.tokens_per_hash]
        path = tuple(block for block in whole if block in popular)
        if path and path[-1] not in known:
            known[path[-1]] = SharedPrefix(path, sum(popular[block] >= span_s for block in path))
        prefixes.append(known[path[-1]] if path else NO_SHARED_PREFIX)
    return prefixes


def _popular_blocks(tree: PrefixTree, records: Sequence[TraceRecord], turns: Sequence[int]) -> dict[int, float]:
    """Returns the blocks that many sessions begin with, and the seconds from first to last use."""
    sessions = [0] * tree.num_blocks
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for request, (record, visit) in enumerate(zip(records, tree.visits, strict=True)):
        for block in visit.blocks[: record.input_length // record.tokens_per_hash]:
            sessions[block] += turns[request] == 1
            first.setdefault(block, request)
            last[block] = request
    enough = max(_MIN_SESSIONS, _MIN_SHARE * len(records))
    return {
        block: records[last[block]].arrived_s - records[first[block]].arrived_s
        for block, count in enumerate(sessions)
        if count >= enough
    }


SharedPrefixKey = tuple[int, int] | None
"""Key of a shared prefix in a growing trace: its deepest block in the given trace's tree, and the round."""


class SharedPrefixChains:
    """Allocates the ids of shared prefixes when they are first used."""

    def __init__(self, ids: BlockIds) -> None:
        self._ids = ids
        self._chains: dict[tuple[int, int], Chain] = {}  # (block, round) → ids up to the block
        self._round = 0

    def key(self, prefix: SharedPrefix, round_number: int) -> SharedPrefixKey:
        """Returns an equal key for the same prefix; if it is not permanent, only within a round."""
        if not prefix.path:
            return None
        return prefix.path[-1], 0 if prefix.permanent == len(prefix.path) else round_number

    def chain(self, prefix: SharedPrefix, room: int, round_number: int) -> Chain:
        """Returns at most `room` blocks. `round_number`: repetitions of the given trace so far; may go back by one."""
        self._forget_before(round_number - 1)
        chain: Chain = ()
        for position, block in enumerate(prefix.path[:room]):
            key = (block, 0 if position < prefix.permanent else round_number)
            if key not in self._chains:
                self._chains[key] = self._ids.extend(chain, 1)
            chain = self._chains[key]
        return chain

    def _forget_before(self, round_number: int) -> None:
        """Drops prefixes of earlier rounds, which are not used again."""
        if round_number <= self._round:
            return
        self._round = round_number
        self._chains = {key: chain for key, chain in self._chains.items() if not 0 < key[1] < round_number}


# The prompts of a growing trace that later ones may begin with, found by size and age.
#
# Prompts are kept in lines: by their whole blocks, for a request that extends one, and by their shared depth, for a
# request that joins others at a common prefix. A line is in order of time, so that a prompt of a given age is found by
# bisection. Only the latest `limit` prompts are kept. Older ones can no longer be extended.

MAX_PROMPTS = 200_000  # prompts, about 200 MB
_NEAREST = 3  # prompts of a line compared on each side
_MAX_SEARCHED = 48  # prompts of a line searched for these on each side
_GRACE_S = 2.0  # differences in age below this hardly matter: traces have clocks as coarse as 3 s
_GOOD_MISMATCH = 0.15  # a mismatch (logarithm of ratios) that ends the search
_NUM_OTHER_SIZES = 24  # lines of other sizes to search
_COMPACT_ABOVE = 1_024


@dataclass(slots=True, eq=False)
class Prompt:
    """One earlier prompt."""

    arrived_s: float
    chain: Chain
    input_length: int
    whole: int  # blocks, without the partial last one
    shared: int  # leading blocks that existed before it
    uses: int  # of the deepest shared block, including this one; 1 = only a shared prefix is
    prefix: SharedPrefixKey
    turn: int = 1  # in its session, as counted by `traces.workload.statistics`
    taken: int = 0  # leading blocks that a later prompt has begun with

    def validate(self) -> None:
        """Raises AssertionError unless the depths are consistent."""
        assert 0 <= self.shared <= len(self.chain)
        assert self.whole <= len(self.chain) <= self.whole + 1
        assert 0 <= self.taken <= len(self.chain)
        assert self.uses >= 1
        assert self.turn >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseTarget:
    """The desired properties of an earlier prompt."""

    prefix: SharedPrefixKey  # the prefix that it must begin with
    blocks: int  # leading blocks to reuse
    most: int  # maximum blocks to reuse, so that the new prompt is no longer than the longest one
    left: int  # whole blocks of the earlier prompt after them; 0 = the new one extends it
    arrived_s: float
    now_s: float
    turn: int  # in its session; 0 = any
    uses: int  # of the deepest block

    @property
    def size(self) -> int:
        """Whole blocks of the earlier prompt."""
        return self.blocks + self.left

    def depth(self, prompt: Prompt) -> int:
        """Returns the number of blocks that the new prompt reuses: all, up to `most`, if it extends this one."""
        return self.blocks if self.left else min(prompt.whole, self.most)


class _AgeIndex:
    """Prompts in order of time. Forgotten ones are removed at the front."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._begin = 0

    def __len__(self) -> int:
        return len(self._prompts) - self._begin

    def add(self, prompt: Prompt) -> None:
        self._prompts.append(prompt)

    def forget_first(self) -> None:
        self._begin += 1
        if self._begin > _COMPACT_ABOVE and self._begin * 2 > len(self._prompts):
            del self._prompts[: self._begin]
            self._begin = 0

    def around(self, arrived_s: float, fits: Callable[[Prompt], bool]) -> list[Prompt]:
        """Returns the fitting prompts nearest to a time, on both sides, and the latest one."""
        prompts = self._prompts
        place = bisect_left(prompts, arrived_s, lo=self._begin, key=attrgetter("arrived_s"))
        later = prompts[place : place + _MAX_SEARCHED]
        earlier = prompts[max(self._begin, place - _MAX_SEARCHED) : place][::-1]
        return [
            *islice(filter(fits, later), _NEAREST),
            *islice(filter(fits, earlier), _NEAREST),
            *filter(fits, prompts[-1:]),
        ]


_AgeIndexes = dict[tuple[SharedPrefixKey, int], _AgeIndex]


class PromptHistory:
    """The latest prompts. Call `add` in order of time."""

    def __init__(self, limit: int = MAX_PROMPTS) -> None:
        self._limit = limit
        self._all: deque[Prompt] = deque()
        self._by_whole: _AgeIndexes = {}
        self._by_shared: _AgeIndexes = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, prompt: Prompt) -> None:
        self._all.append(prompt)
        for lines, key in self._lines_of(prompt):
            lines.setdefault(key, _AgeIndex()).add(prompt)
        if len(self._all) > self._limit:
            self._forget(self._all.popleft())

    def session(self, target: ReuseTarget) -> Prompt | None:
        """Finds the last prompt of a session, to extend it."""

        def fits(prompt: Prompt) -> bool:
            return prompt.taken < prompt.whole <= target.most

        return _nearest(self._by_whole, _sizes_around(target.size, at_least=1), target, fits, _own_mismatch)

    def private(self, target: ReuseTarget) -> Prompt | None:
        """Finds a prompt that introduced the deepest of the wanted blocks, which no other prompt uses yet."""

        def fits(prompt: Prompt) -> bool:
            return max(prompt.taken, prompt.shared) < target.depth(prompt) <= prompt.whole

        sizes = _sizes_around(target.size, at_least=target.blocks if target.left else 1)
        return _nearest(self._by_whole, sizes, target, fits, _own_mismatch)

    def popular(self, target: ReuseTarget) -> Prompt | None:
        """Finds the last user of a shared prefix with the wanted number of blocks, or a few more."""

        def fits(prompt: Prompt) -> bool:
            return prompt.taken < target.blocks <= prompt.shared

        sizes = _sizes_around(target.blocks, at_least=target.blocks)
        return _nearest(self._by_shared, sizes, target, fits, _popularity_mismatch)

    def validate(self) -> None:
        """Raises AssertionError unless each prompt is in exactly its lines."""
        assert len(self._all) <= self._limit
        assert sum(map(len, self._by_whole.values())) == len(self._all)
        assert sum(map(len, self._by_shared.values())) == sum(p.uses > 1 for p in self._all)
        for prompt in self._all:
            prompt.validate()

    def _lines_of(self, prompt: Prompt) -> Iterator[tuple[_AgeIndexes, tuple[SharedPrefixKey, int]]]:
        yield self._by_whole, (prompt.prefix, prompt.whole)
        if prompt.uses > 1:
            yield self._by_shared, (prompt.prefix, prompt.shared)

    def _forget(self, prompt: Prompt) -> None:
        for lines, key in self._lines_of(prompt):
            lines[key].forget_first()
            if not lines[key]:
                del lines[key]


def _sizes_around(size: int, at_least: int) -> Iterator[int]:
    """Yields the size itself, then larger and smaller ones in turn."""
    yield size
    for step in range(1, _NUM_OTHER_SIZES // 2 + 1):
        # Prompts of hundreds of blocks are rare, so the distance grows with the size.
        distance = math.ceil(step * max(1.0, size / 32))
        yield size + distance
        if size - distance >= at_least:
            yield size - distance


def _own_mismatch(prompt: Prompt, target: ReuseTarget) -> float:
    return _age_mismatch(prompt, target) + _session_mismatch(prompt, target)


def _popularity_mismatch(prompt: Prompt, target: ReuseTarget) -> float:
    """Sums the mismatches of depth, age and uses, and of the session if the target has a turn."""
    depth = abs(prompt.shared - target.blocks) / target.blocks
    mismatch = depth + _age_mismatch(prompt, target) + abs(math.log(prompt.uses / target.uses))
    return mismatch + _session_mismatch(prompt, target) if target.turn else mismatch


def _age_mismatch(prompt: Prompt, target: ReuseTarget) -> float:
    wanted_s = target.now_s - target.arrived_s + _GRACE_S
    return abs(math.log((target.now_s - prompt.arrived_s + _GRACE_S) / wanted_s))


def _session_mismatch(prompt: Prompt, target: ReuseTarget) -> float:
    """Sums the mismatches of size and turn."""
    size = abs(prompt.whole - target.size) / target.size
    return size + abs(math.log(prompt.turn / target.turn)) if target.turn else size


def _nearest(
    lines: _AgeIndexes,
    sizes: Iterable[int],
    target: ReuseTarget,
    fits: Callable[[Prompt], bool],
    mismatch: Callable[[Prompt, ReuseTarget], float],
) -> Prompt | None:
    """Returns the first fitting prompt with a good match in the lines of these sizes, otherwise the best one."""
    best: Prompt | None = None
    least = math.inf
    for line in filter(None, (lines.get((target.prefix, size)) for size in sizes)):
        for prompt in line.around(target.arrived_s, fits):
            if (found := mismatch(prompt, target)) < least:
                best, least = prompt, found
            if least < _GOOD_MISMATCH:
                return best
    return best
