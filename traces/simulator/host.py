"""One host whose processors all machines of a cluster share, as on a laptop: who computes, and what that costs others.

Owns the set of machines that compute now. Its rule: a machine is never in its own way. What this does not know: cores,
threads, steps. How much longer steps take is measured (`moonserve profile --serving`), not derived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from traces.simulator.spec import Crowding


class Slowdown(NamedTuple):
    """What company costs a step that begins now."""

    factor: float  # how many times as long it takes
    num_others: int  # who compute


class Host:
    """Without figures in `crowding` every machine has a host of its own, and nothing here has any effect."""

    def __init__(self, crowding: Crowding) -> None:
        self._crowding = crowding
        self._computing: set[str] = set()

    @property
    def is_shared(self) -> bool:
        return bool(self._crowding.prefill or self._crowding.decode)

    def note(self, name: str, computes: bool) -> bool:
        """Whether a machine computes from now on. True = that is news to the others."""
        if computes == (name in self._computing):
            return False
        self._computing ^= {name}
        return True

    def prefill_slowdown(self, name: str) -> Callable[[], float]:
        """How many times as long a chunk takes that this machine begins now."""
        return lambda: self._of(self._crowding.prefill, name)

    def decode_slowdown(self, name: str) -> Callable[[], Slowdown]:
        """Likewise a decode step."""
        return lambda: Slowdown(self._of(self._crowding.decode, name), self._num_others(name))

    def _of(self, factors: Sequence[float], name: str) -> float:
        return factors[min(self._num_others(name), len(factors) - 1)] if factors else 1.0

    def _num_others(self, name: str) -> int:
        return len(self._computing) - (name in self._computing)
