"""The prompts of a growing trace that later ones may begin with, found by size and age.

Prompts are kept in lines: by their whole blocks, for who extends one, and by the depth to which they share, for who
joins others at a common prefix. A line is in the order of time, so a prompt of a certain age is found by bisection.
Only the latest `limit` prompts are remembered; those before can no longer be extended.
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
_NEAREST = 3  # prompts of a line that are compared on each side
_REACH = 48  # prompts of a line that are passed by on each side in search of these
_GRACE_S = 2.0  # ages closer than that are alike: traces have clocks as coarse as 3 s
_GOOD = 0.15  # a mismatch (logarithm of ratios) that ends the search
_SIZES = 24  # lines of other sizes that are looked at
_LONG_LINE = 1_024


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt of the past."""

    arrived_s: float
    chain: Chain
    input_length: int
    whole: int  # blocks without the partial last one
    shared: int  # leading blocks that were there before it
    uses: int  # of the deepest shared block, this one counted; 1 when only a trunk is shared
    trunk: TrunkKey
    turn: int = 1  # in its session, as `traces.analysis.measures` counts
    taken: int = 0  # leading blocks that a later prompt has begun with

    def validate(self) -> None:
        """Raises AssertionError unless the depths lie within each other."""
        assert 0 <= self.shared <= len(self.chain)
        assert self.whole <= len(self.chain) <= self.whole + 1
        assert 0 <= self.taken <= len(self.chain)
        assert self.uses >= 1
        assert self.turn >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an earlier prompt should be like."""

    trunk: TrunkKey  # it begins with this one, and no other will do
    blocks: int  # to begin with
    most: int  # that may be begun with, so that the new prompt stays within the longest one
    left: int  # whole blocks of the earlier prompt behind them; 0: the new one extends it
    arrived_s: float
    now_s: float
    turn: int  # in its session; 0: whichever
    uses: int  # of the deepest block

    @property
    def size(self) -> int:
        """Whole blocks of the earlier prompt."""
        return self.blocks + self.left

    def depth(self, prompt: Prompt) -> int:
        """Where the new prompt leaves this one: at its end, if it is to extend it."""
        return self.blocks if self.left else min(prompt.whole, self.most)


class _Line:
    """Prompts in the order of time; forgotten ones leave at the front."""

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
        """Those that fit next to an instant, on both sides, and the latest one."""
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
    """The latest prompts. `add` must be called in the order of time."""

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
        """The last prompt of a session, to be extended."""

        def fits(prompt: Prompt) -> bool:
            return prompt.taken < prompt.whole <= wish.most

        found = (
            (prompt, _age_mismatch(prompt, wish) + _session_mismatch(prompt, wish))
            for whole in _sizes_around(wish.size, at_least=1)
            for prompt in self._around(self._by_whole.get((wish.trunk, whole)), wish, fits)
        )
        return _best(found)

    def private(self, wish: Wish) -> Prompt | None:
        """A prompt whose deepest block of the wished ones is its own, and not yet used by another."""

        def fits(prompt: Prompt) -> bool:
            return max(prompt.taken, prompt.shared) < wish.depth(prompt) <= prompt.whole

        found = (
            (prompt, _age_mismatch(prompt, wish) + _session_mismatch(prompt, wish))
            for whole in _sizes_around(wish.size, at_least=wish.blocks if wish.left else 1)
            for prompt in self._around(self._by_whole.get((wish.trunk, whole)), wish, fits)
        )
        return _best(found)

    def popular(self, wish: Wish) -> Prompt | None:
        """The last of those that share as many blocks as wished, or a few more."""

        def fits(prompt: Prompt) -> bool:
            return prompt.taken < wish.blocks <= prompt.shared

        found = (
            (prompt, _popularity_mismatch(prompt, wish))
            for shared in _sizes_around(wish.blocks, at_least=wish.blocks)
            for prompt in self._around(self._by_shared.get((wish.trunk, shared)), wish, fits)
        )
        return _best(found)

    def validate(self) -> None:
        """Raises AssertionError unless each prompt stands in exactly its lines."""
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
    """The size itself, then by turns larger and smaller ones."""
    yield size
    for step in range(1, _SIZES // 2 + 1):
        # Prompts of hundreds of blocks are rare: look further around them.
        distance = math.ceil(step * max(1.0, size / 32))
        yield size + distance
        if size - distance >= at_least:
            yield size - distance


def _popularity_mismatch(prompt: Prompt, wish: Wish) -> float:
    """Of depth, age and uses; also of the session, when it is one."""
    depth = abs(prompt.shared - wish.blocks) / wish.blocks
    mismatch = depth + _age_mismatch(prompt, wish) + _uses_mismatch(prompt, wish)
    return mismatch + _session_mismatch(prompt, wish) if wish.turn else mismatch


def _age_mismatch(prompt: Prompt, wish: Wish) -> float:
    wanted_s = wish.now_s - wish.arrived_s + _GRACE_S
    return abs(math.log((wish.now_s - prompt.arrived_s + _GRACE_S) / wanted_s))


def _session_mismatch(prompt: Prompt, wish: Wish) -> float:
    """Of size and turn."""
    size = abs(prompt.whole - wish.size) / wish.size
    return size + abs(math.log(prompt.turn / wish.turn)) if wish.turn else size


def _uses_mismatch(prompt: Prompt, wish: Wish) -> float:
    return abs(math.log(prompt.uses / wish.uses))


def _best(found: Iterator[tuple[Prompt, float]]) -> Prompt | None:
    """The first good one, else the least bad."""
    best: Prompt | None = None
    least = math.inf
    for prompt, mismatch in found:
        if mismatch < least:
            best, least = prompt, mismatch
        if least < _GOOD:
            break
    return best
