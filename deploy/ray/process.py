"""One process of a cluster on Ray as the controller knows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.ray.events import READY, Report
from deploy.ray.units import Kind, Unit

# Those that the conductor knows: a restarted one counts once it has registered again.
_MEMBERS = {Kind.STORE, Kind.PREFILL, Kind.DECODE}


@dataclass(slots=True, eq=False)
class Process:
    """A unit that has a place."""

    unit: Unit
    name: str
    node_id: str
    generation: int
    report: Report | None = None  # None until its actor has answered
    silent_since: float | None = None
    is_leaving: bool = False
    life: int = 0  # deliberate restarts that its actor was asked for
    epoch: int = 0  # under which the conductor knows it; 0 = it does not
    epoch_before: int = 0  # under which it was known when it was told to restart

    @property
    def is_ready(self) -> bool:
        report = self.report
        return report is not None and report.stage == READY and report.life >= self.life

    @property
    def serves(self) -> bool:
        """Whether it is ready and, where that matters, the conductor knows so."""
        return self.is_ready and (
            self.unit.kind not in _MEMBERS or self.epoch not in (0, self.epoch_before)
        )
