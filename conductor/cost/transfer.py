"""How long bytes take from one endpoint to another, beside everything that is already on its way.

`TransferBook` knows the flows that were predicted and not reported as ended, and how much of each should be left: each
link is shared equally by the flows on it, a flow moves at the lesser share of its two ends and never faster than its
pair does alone. Its rule: a flow whose bytes should all have arrived delays nobody any more, so a lost report costs
nothing. A new flow's time is that of its busiest link, where it and every flow there get equal shares until it is done:

    t(b) = max(b / pair, (b + Σ_out min(left, b)) / out, (b + Σ_in min(left, b)) / in)

exact where one link is the bottleneck of all its flows and nothing comes later. Pure; knows endpoints as row numbers
of `bandwidth`, not instances, blocks or requests.
"""

from __future__ import annotations

from collections.abc import Hashable

from conductor.cost.bandwidth import (
    DEFAULT_BYTES_PER_S,
    LOCAL_BYTES_PER_S,
    Bandwidths,
    Floats,
    Rows,
)
from conductor.cost.flows import FlowTable

__all__ = ["DEFAULT_BYTES_PER_S", "LOCAL_BYTES_PER_S", "TransferBook"]


class TransferBook:
    """Flows under way between endpoints. Times are monotonic seconds and never go back."""

    def __init__(self, bandwidths: Bandwidths | None = None) -> None:
        self.bandwidths = bandwidths or Bandwidths()
        self._flows = FlowTable()
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._flows)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._flows

    def join(
        self,
        row: int,
        host: int,
        bytes_per_s: float | None = None,
        local_bytes_per_s: float | None = None,
    ) -> None:
        """An endpoint; one that had the row before has left."""
        self.leave(row)
        self.bandwidths.join(row, host, bytes_per_s, local_bytes_per_s)

    def leave(self, row: int) -> None:
        """An endpoint is gone, and with it all flows from and to it."""
        for key in self._flows.at(row):
            self._flows.remove(key)
        if row < self.bandwidths.num_rows:
            self.bandwidths.leave(row)

    def begin(
        self, key: Hashable, source: int, destination: int, nbytes: float, now: float
    ) -> None:
        """A flow was decided. A key that is under way begins again."""
        self._advance(now)
        self._flows.discard(key)
        if source != destination and nbytes > 0:
            links = self.bandwidths.links_between(source, destination)
            alone = self.bandwidths.alone_between(source, destination)
            self._flows.add(key, (source, destination), links, nbytes, alone)

    def end(self, key: Hashable, now: float) -> None:
        """All bytes have arrived, which tells how fast their pair is. Unknown keys are ignored."""
        self._advance(now)
        ended = self._flows.remove(key)
        if ended is not None:
            self.bandwidths.observe(ended.source, ended.destination, ended.nbytes, ended.alone_s)

    def abandon(self, key: Hashable, now: float) -> None:
        """The flow failed or is not wanted any more. Unknown keys are ignored."""
        if key in self._flows:
            self._advance(now)
            self._flows.discard(key)

    def seconds(self, source: int, destinations: Rows, nbytes: Floats, now: float) -> Floats:
        """From one source to each of N different destinations, `nbytes` of shape [N], each as if the only new flow.
        Nothing to move, and moving to itself, take no time."""
        self._advance(now)
        bandwidths = self.bandwidths
        measured = bandwidths.measured(source)
        return self._flows.seconds(bandwidths.all_links(), source, destinations, nbytes, measured)

    def bytes_left(self, key: Hashable, now: float) -> float:
        """Of a flow under way; 0 when all should have arrived. Raises KeyError."""
        self._advance(now)
        return self._flows.left(key)

    def _advance(self, now: float) -> None:
        if now > self._now:
            self._flows.advance(now - self._now, self.bandwidths.all_links())
            self._now = now

    def validate(self) -> None:
        self._flows.validate()
        self.bandwidths.validate()
