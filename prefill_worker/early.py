"""LOADING → RUNNING: a step that begins before its prompt's prefix is there, and what becomes of it.

A prefix that is read layer by layer is computed behind while it arrives: the engine needs layer l of it when it gets to
layer l. **A step begins early when no waiting is foreseen in it**: the layers that are missing should take less time to
arrive than the engine takes to get to the last of them. Beginning sooner would not end sooner, and the engine would
stand still while others wait. So a step that begins early has one member, may wait for a bounded time only, and is
given up beyond it; its prompt then goes the usual way, once all is loaded.

**Nothing that such a step computed counts before every loaded block has matched its writer's checksum**: its outcome
is put aside until then. Where a block is bad, or did not come, the outcome is dropped and computed again, after its
writes to the decode worker, which nobody has accepted, have ended. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefill_worker.events import PrefixProgress, SliceDone
from protocol.errors import MoonserveError
from protocol.profile import PrefillProfile


@dataclass(slots=True, eq=False, kw_only=True)
class EarlyStep:
    """The step of one sequence that began before its prefix was there."""

    start: int  # its first token: so many must have loaded
    end: int
    num_sent: int  # leading tokens that the target had, or was being sent, before it
    outcome: SliceDone | MoonserveError | None = None  # None: it is under way
    waited_s: float = 0.0
    seconds: float = 0.0  # of the engine, waits included
    is_given_up: bool = False

    def ended(
        self, outcome: SliceDone | MoonserveError, *, waited_s: float = 0.0, seconds: float = 0.0
    ) -> None:
        """The step is over; what it computed is put aside."""
        self.outcome, self.waited_s, self.seconds = outcome, waited_s, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How far a prefix that is read layer by layer has come, and when that was told."""

    progress: PrefixProgress
    at: float

    def left_s(self, now: float) -> float:
        """Until the last layer is there, at the pace so far."""
        told = self.progress
        per_layer_s = told.seconds / told.num_layers
        return max((told.of_layers - told.num_layers) * per_layer_s - (now - self.at), 0.0)

    def hides(self, profile: PrefillProfile, start: int, end: int, now: float) -> bool:
        """Whether computing [start, end) now is not expected to wait: the engine comes to the last layers that
        arrive together after all others."""
        told = self.progress
        before_last = 1.0 - told.layers_at_once / told.of_layers
        return self.left_s(now) <= profile.seconds(end, start) * before_last
