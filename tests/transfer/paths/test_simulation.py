"""Rails with true bandwidths and outages in virtual time, driven as the engine drives them: everything arrives, at
close to the sum of the bandwidths, around outages."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.transfer.paths.test_paths import path
from transfer.paths.chooser import Path, PathChooser
from transfer.paths.health import Condition, RailHealth

GB = 1e9
SLICE_BYTES = 512 << 10
REFUSED_AFTER_S = 0.1  # apart enough for errors to count as several incidents


@dataclass(order=True, slots=True)
class _Ending:
    at: float
    number: int
    path: Path = field(compare=False)
    sent_at: float = field(compare=False)
    tried: tuple[Path, ...] = field(compare=False)
    arrives: bool = field(compare=False)


class Simulation:
    """Each path serves its slices one after the other; `window` of them are in flight at a time."""

    def __init__(
        self,
        bandwidths: Mapping[Path, float],
        *,
        outages: Mapping[Path, tuple[float, float]] | None = None,
        window: int = 16,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.health = RailHealth()
        self.chooser = PathChooser(list(bandwidths), self.health)
        self.bandwidths, self.outages = bandwidths, outages or {}
        self.window, self.jitter, self.random = window, jitter, random.Random(seed)
        self.now = 0.0
        self.sent_while_resting: Counter[Path] = Counter()
        self.arrived_at: dict[Path, list[float]] = defaultdict(list)
        self.num_rests = self.num_given_up = 0
        self._free_at: dict[Path, float] = defaultdict(float)
        self._endings: list[_Ending] = []
        self._number = 0

    @property
    def num_arrived(self) -> int:
        return sum(map(len, self.arrived_at.values()))

    def run(self, num_slices: int, gap_s: float = 0.0) -> float:
        """Moves so many slices, at most one per `gap_s`; returns the bytes per second."""
        began, waiting = self.now, deque[tuple[Path, ...]]([()] * num_slices)
        next_at = self.now
        while waiting or self._endings:
            full = len(self._endings) >= self.window
            if waiting and not full and next_at <= self.now:
                self._send(waiting.popleft())
                next_at = self.now + gap_s
            elif self._endings and (full or not waiting or self._endings[0].at <= next_at):
                retry = self._end(heapq.heappop(self._endings))
                if retry is not None:
                    waiting.appendleft(retry)
            else:
                self.now = next_at
            self.chooser.validate()
        return num_slices * SLICE_BYTES / (self.now - began)

    def _send(self, tried: Sequence[Path]) -> None:
        way = self.chooser.choose(SLICE_BYTES, self.now, tried)
        if way is None:
            self.num_given_up += 1
            return
        if self.health.condition(way.rails, self.now) is Condition.RESTING:
            self.sent_while_resting[way] += 1
        self.chooser.sent(way, SLICE_BYTES)
        begins = max(self.now, self._free_at[way])
        duration = SLICE_BYTES / self.bandwidths[way]
        duration *= 1 + self.jitter * self.random.uniform(-1, 1)
        arrives = not self._is_down(way, begins) and not self._is_down(way, begins + duration)
        at = self._free_at[way] = begins + (duration if arrives else REFUSED_AFTER_S)
        self._number += 1
        heapq.heappush(
            self._endings, _Ending(at, self._number, way, self.now, tuple(tried), arrives)
        )

    def _end(self, ending: _Ending) -> tuple[Path, ...] | None:
        self.now = ending.at
        if ending.arrives:
            self.chooser.done(ending.path, SLICE_BYTES, ending.at - ending.sent_at, self.now)
            self.arrived_at[ending.path].append(self.now)
            return None
        self.num_rests += self.chooser.failed(ending.path, SLICE_BYTES, self.now)
        return (*ending.tried, ending.path)

    def _is_down(self, way: Path, at: float) -> bool:
        begin, end = self.outages.get(way, (0.0, 0.0))
        return begin <= at < end


def rails(count: int) -> list[Path]:
    return [path(rail=f"eth{n}") for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_unknown_unequal_rails_together_give_nearly_the_sum(count: int) -> None:
    draw = random.Random(count)
    bandwidths = {way: draw.uniform(1, 4) * GB for way in rails(count)}
    simulation = Simulation(bandwidths, window=8 * count, jitter=0.2)
    assert simulation.run(2000) >= 0.9 * sum(bandwidths.values())
    assert simulation.num_arrived == 2000


@pytest.mark.parametrize("count", [2, 4])
def test_a_rail_that_goes_down_is_left_alone_while_it_rests_and_comes_back(count: int) -> None:
    ways = rails(count)
    down = ways[1]
    simulation = Simulation(
        dict.fromkeys(ways, 0.005 * GB), outages={down: (5.0, 50.0)}, window=4 * count
    )
    num_slices = 1_250 * count
    simulation.run(num_slices, gap_s=0.12 / count)  # 150 s at 0.87 of the sum
    assert simulation.num_arrived == num_slices
    assert simulation.num_given_up == 0
    assert simulation.sent_while_resting[down] == 0
    # Down at 5, resting to 35, one failed trial, resting to 95, healed.
    assert simulation.num_rests == 2
    assert simulation.health.all_healthy
    back = [at for at in simulation.arrived_at[down] if at > 50.0]
    assert 95.0 <= back[0] <= 99.0
    assert len([at for at in back if at > 100.0]) >= 0.8 * 50 / 0.12


def test_when_every_rail_is_down_slices_end_and_later_ones_get_through() -> None:
    ways = rails(2)
    simulation = Simulation(dict.fromkeys(ways, 1 * GB), outages=dict.fromkeys(ways, (0.0, 10.0)))
    simulation.run(400, gap_s=0.05)  # 20 s
    assert simulation.num_given_up + simulation.num_arrived == 400
    first_back = min(at for times in simulation.arrived_at.values() for at in times)
    assert 10.0 <= first_back <= 10.5  # nothing waits for a rest to end when there is nothing else
