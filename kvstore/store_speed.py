"""How long a read from a store takes, as learned from the reads so far. Pure.

A store's speed is a latency and a time per byte. It begins at a prior by locality and follows the measured reads; it is
forgotten when no read has confirmed it for a while, so that a store that was slow gets another chance. It does not
know why a store is slow: disk, network and a busy machine look the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.request import Endpoint

# The conductor's own assumptions (conductor.cost.transfer): one copy through shared memory, one TCP stream.
LOCAL_BYTES_PER_S = 5e9
REMOTE_BYTES_PER_S = 1e9
# A lease and a batch: two exchanges between Python processes, either side of a millisecond.
LATENCY_S = 1e-3

# Three reads that agree move an estimate four fifths of the way to what they measured.
WEIGHT = 0.4
# A store that is avoided gives no measurements. Longer than a stall lasts, shorter than a user's patience.
FORGET_AFTER_S = 30.0
SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Speed:
    """seconds = latency + bytes · time per byte."""

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.s_per_byte

    def after(self, num_bytes: int, seconds: float) -> Speed:
        """With one more measurement.

        A geometric moving average: speeds differ by factors, and a single stall must not look like a slow store. The
        factor by which the read was off is divided between the two terms as they share in what was expected, so small
        reads teach the latency and large ones the time per byte.
        """
        expected_s = self.seconds(num_bytes)
        factor = max(seconds, SHORTEST_S) / expected_s
        share = self.latency_s / expected_s
        return Speed(
            self.latency_s * factor ** (WEIGHT * share),
            self.s_per_byte * factor ** (WEIGHT * (1 - share)),
        )


class StoreSpeeds:
    """The stores that one reader has met, by instance id."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Speed, float]] = {}  # and when it was measured

    def of(self, store: Endpoint, reader_host: str, now: float) -> Speed:
        """What to expect of a store now."""
        speed, measured_at = self._known.get(store.instance_id, (None, 0.0))
        if speed is None or now - measured_at > FORGET_AFTER_S:
            self._known.pop(store.instance_id, None)
            return prior(store, reader_host)
        return speed

    def measured(self, store: Endpoint, speed: Speed, now: float) -> None:
        """The speed of a store after its latest read."""
        self._known[store.instance_id] = speed, now

    def all(self) -> Mapping[str, Speed]:
        """What was measured and is not forgotten, for metrics."""
        return {name: speed for name, (speed, _) in list(self._known.items())}


def prior(store: Endpoint, reader_host: str) -> Speed:
    """What to expect of a store of which nothing is known."""
    rate = LOCAL_BYTES_PER_S if store.host == reader_host else REMOTE_BYTES_PER_S
    return Speed(LATENCY_S, 1 / rate)
