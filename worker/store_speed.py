"""Estimates how long a read from a store takes, from earlier reads. Pure.

A store's speed is a latency and a time per byte. The estimate starts with a prior by locality and follows the measured
reads. It is forgotten if no read has confirmed it for a while, so that a store that was slow gets another chance. It
does not know why a store is slow: disk, network and a busy machine look the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moonserve.protocol.request import Endpoint

# The conductor's own assumptions (conductor.prediction.transfer_time): one copy through shared memory, one TCP stream.
LOCAL_BYTES_PER_S = 5e9
REMOTE_BYTES_PER_S = 1e9
# A lease and a batch: two exchanges between Python processes, about a millisecond in all.
LATENCY_S = 1e-3

# Three reads that agree move an estimate four fifths of the way to what they measured.
WEIGHT = 0.4
# An avoided store yields no measurements. Longer than a stall lasts, shorter than a user's patience.
FORGET_AFTER_S = 30.0
SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a store: seconds = latency + bytes · time per byte."""

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.s_per_byte

    def after(self, num_bytes: int, seconds: float) -> "Speed":
        """Returns the speed updated with one more measurement.

        A geometric moving average: speeds differ by factors, and a single stall must not look like a slow store. The
        factor between measured and expected time is divided between the two terms by their share of the expected time,
        so that small reads adjust the latency and large reads the time per byte.
        """
        expected_s = self.seconds(num_bytes)
        factor = max(seconds, SHORTEST_S) / expected_s
        share = self.latency_s / expected_s
        return Speed(
            self.latency_s * factor ** (WEIGHT * share),
            self.s_per_byte * factor ** (WEIGHT * (1 - share)),
        )


class StoreSpeeds:
    """Speeds of the stores that one reader has read from, by instance id."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Speed, float]] = {}  # speed, measured at

    def of(self, store: Endpoint, reader_host: str, now: float) -> Speed:
        """Returns the expected speed of a store now."""
        speed, measured_at = self._known.get(store.instance_id, (None, 0.0))
        if speed is None or now - measured_at > FORGET_AFTER_S:
            self._known.pop(store.instance_id, None)
            return prior(store, reader_host)
        return speed

    def measured(self, store: Endpoint, speed: Speed, now: float) -> None:
        """Sets the speed of a store after its latest read."""
        self._known[store.instance_id] = speed, now

    def all(self) -> Mapping[str, Speed]:
        """Returns the measured speeds that are still stored, for metrics."""
        return {name: speed for name, (speed, _) in list(self._known.items())}


def prior(store: Endpoint, reader_host: str) -> Speed:
    """Returns the expected speed of a store without measurements."""
    rate = LOCAL_BYTES_PER_S if store.host == reader_host else REMOTE_BYTES_PER_S
    return Speed(LATENCY_S, 1 / rate)
