"""Differences between the running totals of successive heartbeats of one instance. Pure.

The first heartbeat only sets the start values, because its totals may be old or already reported to another conductor.
Totals that decrease are ignored.
"""

import math
from collections.abc import Iterator, Sequence

from moonserve.conductor.events import StepTotals, TrafficTotals
from moonserve.protocol.request import InstanceId


class HeartbeatDeltas:
    """Last reported totals of one incarnation of an instance."""

    def __init__(self) -> None:
        self._steps: StepTotals | None = None
        self._traffic: dict[InstanceId, TrafficTotals] | None = None

    def new_steps(self, steps: StepTotals) -> StepTotals | None:
        """Returns the steps since the last heartbeat; None at the first one, or if there are none."""
        before, self._steps = self._steps, steps
        if before is None or steps.num_steps <= before.num_steps:
            return None
        return StepTotals(
            num_steps=steps.num_steps - before.num_steps,
            seconds=steps.seconds - before.seconds,
            sequences=steps.sequences - before.sequences,
            context_tokens=steps.context_tokens - before.context_tokens,
        )

    def new_traffic(self, traffic: Sequence[TrafficTotals]) -> Iterator[TrafficTotals]:
        """Yields, for each peer, the traffic since the last heartbeat."""
        before, self._traffic = self._traffic, {each.peer: each for each in traffic}
        if before is None:
            return
        for each in traffic:
            known = before.get(each.peer, TrafficTotals(peer=each.peer))
            yield TrafficTotals(
                peer=each.peer,
                read_bytes=max(each.read_bytes - known.read_bytes, 0),
                read_s=_more(each.read_s, known.read_s),
                written_bytes=max(each.written_bytes - known.written_bytes, 0),
                written_s=_more(each.written_s, known.written_s),
            )


def _more(later_s: float, earlier_s: float) -> float:
    """Returns the difference, or 0 if it is negative or not finite."""
    return later_s - earlier_s if earlier_s < later_s < math.inf else 0.0
