"""Rails with true bandwidths and outages in virtual time, driven by the chooser as the engine drives it."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transfer.rails.health import Condition
from transfer.rails.paths import Path, PathChooser

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
        chooser: PathChooser,
        bandwidths: Mapping[Path, float],
        *,
        outages: Mapping[Path, tuple[float, float]] | None = None,
        window: int = 16,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.chooser, self.bandwidths, self.outages = chooser, bandwidths, outages or {}
        self.window, self.jitter, self.random = window, jitter, random.Random(seed)
        self.now = 0.0
        self.arrived: Counter[Path] = Counter()
        self.sent_while_resting: Counter[Path] = Counter()
        self.arrived_at: dict[Path, list[float]] = defaultdict(list)
        self.num_given_up = 0
        self._free_at: dict[Path, float] = defaultdict(float)
        self._endings: list[_Ending] = []
        self._number = 0

    def run(self, num_slices: int, location: str = "cpu:0", gap_s: float = 0.0) -> float:
        """Moves so many slices, at most one per `gap_s`; returns how long it took."""
        began, waiting = self.now, deque[tuple[Path, ...]]([()] * num_slices)
        next_at = self.now
        while waiting or self._endings:
            full = len(self._endings) >= self.window
            if waiting and not full and next_at <= self.now:
                self._send(location, waiting.popleft())
                next_at = self.now + gap_s
            elif self._endings and (full or not waiting or self._endings[0].at <= next_at):
                retry = self._end(heapq.heappop(self._endings))
                if retry is not None:
                    waiting.appendleft(retry)
            else:
                self.now = next_at
            self.chooser.validate()
        return self.now - began

    def _send(self, location: str, tried: Sequence[Path]) -> None:
        path = self.chooser.choose(location, SLICE_BYTES, self.now, tried)
        if path is None:
            self.num_given_up += 1
            return
        if self._condition(path) is Condition.RESTING:
            self.sent_while_resting[path] += 1
        self.chooser.sent(path, SLICE_BYTES)
        begins = max(self.now, self._free_at[path])
        duration = SLICE_BYTES / self.bandwidths[path]
        duration *= 1 + self.jitter * self.random.uniform(-1, 1)
        arrives = not self._is_down(path, begins) and not self._is_down(path, begins + duration)
        at = begins + (duration if arrives else REFUSED_AFTER_S)
        self._free_at[path] = at
        self._number += 1
        heapq.heappush(
            self._endings, _Ending(at, self._number, path, self.now, tuple(tried), arrives)
        )

    def _end(self, ending: _Ending) -> tuple[Path, ...] | None:
        self.now = ending.at
        if ending.arrives:
            seconds = ending.at - ending.sent_at
            self.chooser.done(ending.path, SLICE_BYTES, seconds, self.now)
            self.arrived[ending.path] += 1
            self.arrived_at[ending.path].append(self.now)
            return None
        self.chooser.failed(ending.path, SLICE_BYTES, self.now)
        return (*ending.tried, ending.path)

    def _is_down(self, path: Path, at: float) -> bool:
        begin, end = self.outages.get(path, (0.0, 0.0))
        return begin <= at < end

    def _condition(self, path: Path) -> Condition:
        terms = self.chooser.explain("cpu:0", self.now)
        return next(term.condition for term in terms if term.path is path)
