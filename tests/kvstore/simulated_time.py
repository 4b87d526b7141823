"""What the parts of a simulation need of their world: its time, its chance, each other and the truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tests.kvstore.simulated_removals import Truth

if TYPE_CHECKING:
    from tests.kvstore.simulated_node import SimulatedNode


class Time(Protocol):
    """What a node needs of its world."""

    now: float
    rng: random.Random
    nodes: list[SimulatedNode]
    truth: Truth

    def later(self, delay_s: float, action: Callable[[], None]) -> None: ...

    def note(self, *what: object) -> None: ...
