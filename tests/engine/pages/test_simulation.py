"""A long life of a pool, from a seed: requests come, grow, rest, wake, are evicted and go, while its size changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine.pages.base import Eviction, Mark, PageCore, PoolConfig, Wish
from engine.pages.native import NativePages
from engine.pages.prototypes import PagesLibrary
from engine.pages.twin import PythonPages
from tests.thoroughness import examples

OPERATIONS = 100_000
CONFIG = {"num_blocks": 4_000, "max_blocks": 5_000, "max_requests": 1_500, "high_share": 0.1}


@dataclass
class Simulation:
    """Draws what happens from the seed and from what the core answers; `log` is these answers."""

    core: PageCore
    rng: random.Random
    names: list[int] = field(default_factory=list)  # of requests that are there
    log: list[object] = field(default_factory=list)
    came: int = 0

    def step(self) -> None:
        action = self.rng.choices(
            (self.come, self.grow_one, self.mark, self.go, self.promise, self.resize),
            (30, 30, 25, 12, 2, 1),
        )[0]
        self.log.append(action())

    def come(self) -> object:
        self.came += 1
        handle = self.came * 0x9E3779B97F4A7C15 % 2**64
        priority = int(self.rng.random() < 0.1)
        wish = Wish(handle, self.rng.randrange(1, 9), priority, self.rng.choice([0, 0, 16, 100]))
        blocks, evicted = self.core.allocate_evicting(wish)
        self._lose(evicted)
        if blocks is not None:
            self.names.append(handle)
        return blocks, evicted

    def grow_one(self) -> object:
        if not self.names:
            return None
        wish = Wish(self.rng.choice(self.names), self.rng.choice([1, 1, 1, 4]), existing=True)
        blocks, evicted = self.core.allocate_evicting(wish)
        self._lose(evicted)
        return blocks, evicted

    def mark(self) -> object:
        if not self.names:
            return None
        mark = self.rng.choices(list(Mark), (70, 20, 3, 7))[0]
        return self.core.mark(self.rng.choice(self.names), mark)

    def go(self) -> object:
        if not self.names:
            return None
        at = self.rng.randrange(len(self.names))
        self.names[at], self.names[-1] = self.names[-1], self.names[at]
        return self.core.free(self.names.pop())

    def promise(self) -> object:
        if not self.names:
            return None
        return self.core.reserve(self.rng.choice(self.names), self.rng.randrange(20), 0)

    def resize(self) -> object:
        if self.rng.random() < 0.5:
            return self.core.grow(self.rng.randrange(200))
        return self.core.shrink(self.rng.randrange(200)).tolist()

    def _lose(self, evicted: list[int]) -> None:
        gone = set(evicted)
        if gone:
            self.names = [name for name in self.names if name not in gone]


@pytest.mark.parametrize("policy", list(Eviction))
def test_a_long_life_is_the_same_in_both_cores(library: PagesLibrary, policy: Eviction) -> None:
    """Equal seeds give equal answers over a hundred thousand operations in all, and the books hold throughout."""
    config = PoolConfig(**CONFIG, eviction=policy)  # type: ignore[arg-type]
    lives = [
        Simulation(core, random.Random(policy))
        for core in (NativePages(library, config), PythonPages(config))
    ]
    for number in range(examples(OPERATIONS // len(Eviction) + 1)):
        for life in lives:
            life.step()
        assert lives[0].log == lives[1].log
        for life in lives:
            life.log.clear()
            if number % 500 == 0:
                life.core.validate()
    stats = lives[0].core.stats()
    assert stats.evictions
    assert stats.refusals
    for life in lives:
        for name in life.names:
            life.core.free(name)
        life.core.validate()
        assert life.core.stats().free == life.core.stats().num_blocks
