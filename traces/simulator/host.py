"""One host whose processors all machines of a cluster share, as on a laptop: who computes, and what that costs others.

Owns the set of machines that compute now. Its rule: a machine is never in its own way. A decode machine is other
company than a prefill machine: with each of its steps a gateway and clients compute too. What this does not know:
cores, threads, steps. How much longer steps take is measured (`moonserve profile --serving`), not derived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from traces.simulator.spec import CROWDED_BATCH, Crowding, Overheads


class Slowdown(NamedTuple):
    """What company costs a step that begins now."""

    factor: float  # how many times as long it takes
    num_others: int  # who compute


class Host:
    """Without figures in `crowding` every machine has a host of its own, and nothing here has any effect."""

    def __init__(self, crowding: Crowding, overheads: Overheads) -> None:
        self._crowding = crowding
        self._overheads = overheads  # alone
        self._computing: dict[str, bool] = {}  # whether it decodes, by name

    @property
    def is_shared(self) -> bool:
        return bool(self._crowding.prefill or self._crowding.decode)

    def note(self, name: str, computes: bool, *, decodes: bool) -> bool:
        """Whether a machine computes from now on. True = that is news to the others."""
        if computes == (name in self._computing):
            return False
        if computes:
            self._computing[name] = decodes
        else:
            del self._computing[name]
        return True

    def prefill_slowdown(self, name: str) -> Callable[[], float]:
        """How many times as long a chunk takes that this machine begins now."""
        crowding = self._crowding
        return lambda: self._of(crowding.prefill, crowding.prefill_beside_prefills, name)

    def decode_slowdown(self, name: str) -> Callable[[int], Slowdown]:
        """Likewise a decode step of so many sequences."""
        return lambda num_seqs: self._of_step(name, num_seqs)

    def _of_step(self, name: str, num_seqs: int) -> Slowdown:
        num_others = len(self._others(name))
        one = _at(self._crowding.decode, num_others)
        batch = _at(self._crowding.decode_batch or self._crowding.decode, num_others)
        share = min(max(num_seqs - 1, 0) / (CROWDED_BATCH - 1), 1.0)
        return Slowdown(one + (batch - one) * share, num_others)

    @property
    def late_s(self) -> float:
        """By which a request's way to its machine now takes longer than alone."""
        now, alone = self.overheads_beside(None), self._overheads
        return (now.request_s - now.back_s) - (alone.request_s - alone.back_s)

    def overheads_beside(self, name: str | None) -> Overheads:
        """What a prompt costs beside its computing while all but its own machine, which may not be known, go on."""
        overheads, crowding = self._overheads, self._crowding
        request = self._of(crowding.request, crowding.request_beside_prefills, name)
        landing = self._of(crowding.landing, crowding.landing_beside_prefills, name)
        return replace(
            overheads,
            request_s=overheads.request_s * request,
            back_s=overheads.back_s * request,
            landing_s=overheads.landing_s * landing,
        )

    def back_s(self, name: str, *, goes_on: bool) -> float:
        """What a first token's way takes now from a machine that goes on with another prompt, or does not."""
        late_s = self._overheads.late_back_s if goes_on else 0.0
        return self.overheads_beside(name).back_s + late_s

    def handoff_s(self, name: str, *, goes_on: bool) -> float:
        """What the handoff of a prompt takes now whose machine goes on with another, or does not."""
        num_prefills = self._others(name).count(False) + goes_on
        return self._overheads.handoff_s * _at(self._crowding.handoff, num_prefills)

    def _of(self, beside_decoding: Sequence[float], beside_prefills: Sequence[float], name: str | None) -> float:
        others = self._others(name)
        factors = beside_decoding if any(others) else beside_prefills or beside_decoding
        return _at(factors, len(others))

    def _others(self, name: str | None) -> list[bool]:
        """Whether it decodes, of each that computes beside a machine."""
        return [decodes for other, decodes in self._computing.items() if other != name]


def _at(factors: Sequence[float], num_others: int) -> float:
    return factors[min(num_others, len(factors) - 1)] if factors else 1.0
