"""The prompts of a growing trace that later ones may begin with, found by size and age.

Prompts are kept in lines: by their whole blocks, for a request that extends one, and by their shared depth, for a
request that joins others at a common prefix. A line is in order of time, so that a prompt of a given age is found by
bisection. Only the latest `limit` prompts are kept. Older ones can no longer be extended.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from traces.synthesis.trunks import Chain, TrunkKey

REMEMBERED = 200_000  # prompts, about 200 MB
_NEAREST = 3  # prompts of a line compared on each side
_REACH = 48  # prompts of a line searched for these on each side
_GRACE_S = 2.0  # differences in age below this hardly matter: traces have clocks as coarse as 3 s
_GOOD = 0.15  # a mismatch (logarithm of ratios) that ends the search
_SIZES = 24  # lines of other sizes to search
_LONG_LINE = 1_024


@dataclass(slots=True, eq=False)
class Prompt:
    """One earlier prompt."""

    arrived_s: float
    chain: Chain
    input_length: int
    whole: int  # blocks, without the partial last one
    shared: int  # leading blocks that existed before it
    uses: int  # of the deepest shared block, including this one; 1 = only a trunk is shared
    trunk: TrunkKey
    turn: int = 1  # in its session, as counted by `traces.analysis.measures`
    taken: int = 0  # leading blocks that a later prompt has begun with

    def validate(self) -> None:
        """Raises AssertionError unless the depths are consistent."""
        assert 0 <= self.shared <= len(self.chain)
        assert self.whole <= len(self.chain) <= self.whole + 1
        assert 0 <= self.taken <= len(self.chain)
        assert self.uses >= 1
        assert self.turn >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The desired properties of an earlier prompt."""

    trunk: TrunkKey  # the trunk that it must begin with
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


class _Line:
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
        if self._begin > _LONG_LINE and self._begin * 2 > len(self._prompts):
            del self._prompts[: self._begin]
            self._begin = 0

    def around(self, arrived_s: float, fits: Callable[[Prompt], bool]) -> list[Prompt]:
        """Returns the fitting prompts nearest to a time, on both sides, and the latest one."""
        prompts = self._prompts
        place = bisect_left(prompts, arrived_s, lo=self._begin, key=attrgetter("arrived_s"))
        later = prompts[place : place + _REACH]
        earlier = prompts[max(self._begin, place - _REACH) : place][::-1]
        return [
            *islice(filter(fits, later), _NEAREST),
            *islice(filter(fits, earlier), _NEAREST),
            *filter(fits, prompts[-1:]),
        ]


_Lines = dict[tuple[TrunkKey, int], _Line]


class Past:
    """The latest prompts. Call `add` in order of time."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._all: deque[Prompt] = deque()
        self._by_whole: _Lines = {}
        self._by_shared: _Lines = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, prompt: Prompt) -> None:
        self._all.append(prompt)
        for lines, key in self._lines_of(prompt):
            lines.setdefault(key, _Line()).add(prompt)
        if len(self._all) > self._limit:
            self._forget(self._all.popleft())

    def session(self, wish: Wish) -> Prompt | None:
        """Finds the last prompt of a session, to extend it."""

        def fits(prompt: Prompt) -> bool:
            return prompt.taken < prompt.whole <= wish.most

        found = (
            (prompt, _age_mismatch(prompt, wish) + _session_mismatch(prompt, wish))
            for whole in _sizes_around(wish.size, at_least=1)
            for prompt in self._around(self._by_whole.get((wish.trunk, whole)), wish, fits)
        )
        return _best(found)

    def private(self, wish: Wish) -> Prompt | None:
        """Finds a prompt that introduced the deepest of the wished blocks, which no other prompt uses yet."""

        def fits(prompt: Prompt) -> bool:
            return max(prompt.taken, prompt.shared) < wish.depth(prompt) <= prompt.whole

        found = (
            (prompt, _age_mismatch(prompt, wish) + _session_mismatch(prompt, wish))
            for whole in _sizes_around(wish.size, at_least=wish.blocks if wish.left else 1)
            for prompt in self._around(self._by_whole.get((wish.trunk, whole)), wish, fits)
        )
        return _best(found)

    def popular(self, wish: Wish) -> Prompt | None:
        """Finds the last user of a shared prefix with the wished number of blocks, or a few more."""

        def fits(prompt: Prompt) -> bool:
            return prompt.taken < wish.blocks <= prompt.shared

        found = (
            (prompt, _popularity_mismatch(prompt, wish))
            for shared in _sizes_around(wish.blocks, at_least=wish.blocks)
            for prompt in self._around(self._by_shared.get((wish.trunk, shared)), wish, fits)
        )
        return _best(found)

    def validate(self) -> None:
        """Raises AssertionError unless each prompt is in exactly its lines."""
        assert len(self._all) <= self._limit
        assert sum(map(len, self._by_whole.values())) == len(self._all)
        assert sum(map(len, self._by_shared.values())) == sum(p.uses > 1 for p in self._all)
        for prompt in self._all:
            prompt.validate()

    def _around(self, line: _Line | None, wish: Wish, fits: Callable[[Prompt], bool]) -> list[Prompt]:
        return line.around(wish.arrived_s, fits) if line else []

    def _lines_of(self, prompt: Prompt) -> Iterator[tuple[_Lines, tuple[TrunkKey, int]]]:
        yield self._by_whole, (prompt.trunk, prompt.whole)
        if prompt.uses > 1:
            yield self._by_shared, (prompt.trunk, prompt.shared)

    def _forget(self, prompt: Prompt) -> None:
        for lines, key in self._lines_of(prompt):
            lines[key].forget_first()
            if not lines[key]:
                del lines[key]


def _sizes_around(size: int, at_least: int) -> Iterator[int]:
    """Yields the size itself, then larger and smaller ones in turn."""
    yield size
    for step in range(1, _SIZES // 2 + 1):
        # Prompts of hundreds of blocks are rare, so the distance grows with the size.
        distance = math.ceil(step * max(1.0, size / 32))
        yield size + distance
        if size - distance >= at_least:
            yield size - distance


def _popularity_mismatch(prompt: Prompt, wish: Wish) -> float:
    """Sums the mismatches of depth, age and uses, and of the session if the wish has a turn."""
    depth = abs(prompt.shared - wish.blocks) / wish.blocks
    mismatch = depth + _age_mismatch(prompt, wish) + _uses_mismatch(prompt, wish)
    return mismatch + _session_mismatch(prompt, wish) if wish.turn else mismatch


def _age_mismatch(prompt: Prompt, wish: Wish) -> float:
    wanted_s = wish.now_s - wish.arrived_s + _GRACE_S
    return abs(math.log((wish.now_s - prompt.arrived_s + _GRACE_S) / wanted_s))


def _session_mismatch(prompt: Prompt, wish: Wish) -> float:
    """Sums the mismatches of size and turn."""
    size = abs(prompt.whole - wish.size) / wish.size
    return size + abs(math.log(prompt.turn / wish.turn)) if wish.turn else size


def _uses_mismatch(prompt: Prompt, wish: Wish) -> float:
    return abs(math.log(prompt.uses / wish.uses))


def _best(found: Iterator[tuple[Prompt, float]]) -> Prompt | None:
    """Returns the first prompt with a good match, otherwise the best one."""
    best: Prompt | None = None
    least = math.inf
    for prompt, mismatch in found:
        if mismatch < least:
            best, least = prompt, mismatch
        if least < _GOOD:
            break
    return best
