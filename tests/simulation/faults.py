"""Seeded faults of a world: crashes, stops, successors of live processes, cut and bad links, corrupted memory."""

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.loop import OUTSIDE
from tests.simulation.network import Weather

if TYPE_CHECKING:
    from tests.simulation.world import World

FIRST_S, LAST_S = 0.8, 7.0
RESTART_S = (0.05, 3.0)  # until a crashed process restarts
SHORT_S, LONG_S = (0.05, 8.0), (8.0, 28.0)
"""Durations of stops and cuts."""


class Faults:
    """Faults of one world. All of them have ended when `calm` returns."""

    def __init__(self, cluster: "World", rng: random.Random, *, is_long: bool) -> None:
        """With `is_long`, stops and cuts outlast all timeouts."""
        self._lasting_s = LONG_S if is_long else SHORT_S
        self._cluster = cluster
        self._rng = rng
        self._undone: list[Callable[[], None]] = []
        self._is_calm = False
        weather = cluster.network.weather
        if rng.random() < 0.6:
            weather.loss = rng.choice((0.002, 0.01, 0.05))
        if rng.random() < 0.5:
            weather.duplication = rng.choice((0.01, 0.1))
        if rng.random() < 0.5:
            weather.stalls = rng.choice((0.01, 0.1))
        if rng.random() < 0.3:
            weather.corruption = rng.choice((0.01, 0.1))
        if rng.random() < 0.3:
            weather.engine_failures = rng.choice((0.002, 0.02))
        for _ in range(rng.choice((2, 4, 6, 8) if cluster.is_pool else (0, 1, 1, 2, 3, 5))):
            cluster.loop.call_later(rng.uniform(FIRST_S, LAST_S), self._strike, context=OUTSIDE)

    def calm(self) -> None:
        """Ends all faults and starts no more."""
        self._is_calm = True
        for undo in self._undone:
            undo()
        self._cluster.network.weather = Weather()
        self._cluster.network.heal_all()

    def _strike(self) -> None:
        if self._is_calm:
            return
        kinds = (
            *(self._crash, self._crash, self._stop, self._stop, self._drain),
            *(self._cut, partial(self._cut, both_ways=False)),
            self._lose_disk if self._cluster.is_pool else self._succeed,
        )
        self._rng.choice(kinds)()

    def _until(self, seconds: tuple[float, float], undo: Callable[[], None]) -> None:
        """Calls `undo` once: after a random time, or when the world becomes calm if that is earlier."""
        pending = [undo]

        def undo_once() -> None:
            if pending:
                pending.pop()()

        self._undone.append(undo_once)
        self._cluster.loop.call_later(self._rng.uniform(*seconds), undo_once, context=OUTSIDE)

    def _victim(self) -> str:
        return self._rng.choice(self._cluster.names)

    def _crash(self) -> None:
        name = self._victim()
        self._cluster.note(f"crash {name}")
        self._cluster.crash(name)
        self._until(RESTART_S, lambda: self._cluster.start(name))

    def _stop(self) -> None:
        name = self._victim()
        self._cluster.note(f"stop {name}")
        self._cluster.stop(name)
        self._until(self._lasting_s, lambda: self._cluster.go_on(name))

    def _drain(self) -> None:
        self._cluster.drain(self._victim())

    def _succeed(self) -> None:
        """Stops a process, starts a successor as if it were dead, and later continues it."""
        name = self._rng.choice([n for n in self._cluster.names if not n.startswith("gateway")])
        if name == "conductor":
            return
        self._cluster.note(f"succeed {name}")
        self._cluster.stop(name)
        self._cluster.succeed(name)
        self._until(self._lasting_s, lambda: self._cluster.go_on(name))

    def _lose_disk(self) -> None:
        name = self._victim()
        if self._rng.random() < 0.3:
            self._cluster.note(f"lose the disk of {name}")
            self._cluster.lose_disk(name)

    def _cut(self, *, both_ways: bool = True) -> None:
        network = self._cluster.network
        one, other = self._rng.sample(self._cluster.names, 2)
        links = ((one, other), (other, one)) if both_ways else ((one, other),)
        self._cluster.note(f"cut {links}")
        for link in links:
            network.cut(*link)

        def heal() -> None:
            for link in links:
                network.heal(*link)

        self._until(self._lasting_s, heal)
