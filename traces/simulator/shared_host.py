"""A host whose processors all machines of a cluster share, as on a laptop, and the resulting slowdown.

Owns the set of machines that compute now. Rule: a machine never slows down itself. A decode machine counts differently
from a prefill machine, because a gateway and clients compute after each of its steps. Slowdowns are measured
(`moonserve profile --serving`), not derived. Does not know cores, threads or steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from moonserve.traces.simulator.spec import CROWDED_BATCH, Crowding, Overheads


class Slowdown(NamedTuple):
    """Effect of other running machines on a step that begins now."""

    factor: float  # duration ÷ duration alone
    num_others: int  # that compute now


class SharedHost:
    """The shared host. Without figures in `crowding`, every machine has its own host and nothing here has an effect."""

    def __init__(self, crowding: Crowding, overheads: Overheads) -> None:
        self._crowding = crowding
        self._overheads = overheads  # on an idle host
        self._computing: dict[str, bool] = {}  # name → True if it decodes

    @property
    def is_shared(self) -> bool:
        return bool(self._crowding.prefill or self._crowding.decode)

    def set_computing(self, name: str, computes: bool, *, decodes: bool) -> bool:
        """Records if a machine computes from now on. True = this changes the load of the others."""
        if computes == (name in self._computing):
            return False
        if computes:
            self._computing[name] = decodes
        else:
            del self._computing[name]
        return True

    def prefill_slowdown(self, name: str) -> float:
        """Returns the slowdown factor of a chunk that this machine begins now."""
        return self._of(self._crowding.prefill, self._crowding.prefill_beside_prefills, name)

    def decode_slowdown(self, name: str, num_seqs: int) -> Slowdown:
        """Returns the slowdown of a decode step of `num_seqs` sequences that this machine begins now."""
        num_others = len(self._others(name))
        one = _at(self._crowding.decode, num_others)
        batch = _at(self._crowding.decode_batch or self._crowding.decode, num_others)
        share = min(max(num_seqs - 1, 0) / (CROWDED_BATCH - 1), 1.0)
        return Slowdown(one + (batch - one) * share, num_others)

    @property
    def late_s(self) -> float:
        """Seconds by which a request takes longer to reach its machine now than on an idle host."""
        now, alone = self.overheads_now(None), self._overheads
        return (now.request_s - now.back_s) - (alone.request_s - alone.back_s)

    def overheads_now(self, name: str | None) -> Overheads:
        """Returns a prompt's overheads while all machines but its own go on. `name`: its own; None = not known yet."""
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
        """Returns the seconds a first token needs to its client. `goes_on`: the machine continues with another one."""
        late_s = self._overheads.late_back_s if goes_on else 0.0
        return self.overheads_now(name).back_s + late_s

    def handoff_s(self, name: str, *, goes_on: bool) -> float:
        """Returns the seconds a prompt's handoff takes now. `goes_on`: its machine continues with another prompt."""
        num_prefills = self._others(name).count(False) + goes_on
        return self._overheads.handoff_s * _at(self._crowding.handoff, num_prefills)

    def _of(self, beside_decoding: Sequence[float], beside_prefills: Sequence[float], name: str | None) -> float:
        others = self._others(name)
        factors = beside_decoding if any(others) else beside_prefills or beside_decoding
        return _at(factors, len(others))

    def _others(self, name: str | None) -> list[bool]:
        """Returns for each other machine that computes now True if it decodes."""
        return [decodes for other, decodes in self._computing.items() if other != name]


def _at(factors: Sequence[float], num_others: int) -> float:
    return factors[min(num_others, len(factors) - 1)] if factors else 1.0
