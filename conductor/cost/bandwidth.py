"""Bandwidth between two endpoints without other traffic: measured per pair, else per link, else a default.

An endpoint is a row number assigned by the caller. It has two links in each direction, because traffic within its host
is a memory copy and other traffic passes its network: link = 2 · row + (1 within a host, 0 beyond). Rates are running
means of logarithms with a clipped step, so that one stall counts little. The rate of a link rises faster than it falls,
since a slow transfer may be slow at its other end. Pure; knows no flows, instances or time.
"""

from __future__ import annotations

import math

import numpy as np

from conductor.columns import Floats
from conductor.native.kernels import Links

# Between hosts, if an instance did not measure: the rate of one TCP stream between two Python processes.
DEFAULT_BYTES_PER_S = 1e9
# Within a host, by one copy through shared memory: half the rate at which a core copies into prefaulted pages.
LOCAL_BYTES_PER_S = 5e9
# A smaller transfer measures a round trip, not a bandwidth.
MEASURED_FROM = 64 << 10

_WEIGHT = 0.2  # of the newest transfer in a pair's mean, as in `compute.Correction`
_LINK_RISE, _LINK_FALL = 0.5, 0.05
_CLIP = math.log(4.0)


class Bandwidths:
    """Link and pair rates of all endpoints; the number of rows grows by doubling."""

    def __init__(self, num_rows: int = 64) -> None:
        self._hosts = np.zeros(num_rows, np.int64)
        self.out_rates = np.tile((DEFAULT_BYTES_PER_S, LOCAL_BYTES_PER_S), num_rows)
        self.in_rates = self.out_rates.copy()
        self._links: Links | None = None  # cached; the columns are replaced only when they grow
        self._pairs: dict[int, Floats] = {}  # source → rate to each row; NaN = not measured

    @property
    def num_rows(self) -> int:
        return len(self._hosts)

    def join(self, row: int, host: int, bytes_per_s: float, local_bytes_per_s: float) -> None:
        """Adds an endpoint on machine `host`, with its network rate and its rate within the host; 0 = not measured."""
        while row >= self.num_rows:
            self._grow()
        self.leave(row)
        self._hosts[row] = host
        rates = (bytes_per_s or DEFAULT_BYTES_PER_S, local_bytes_per_s or LOCAL_BYTES_PER_S)
        self.out_rates[2 * row : 2 * row + 2] = self.in_rates[2 * row : 2 * row + 2] = rates

    def leave(self, row: int) -> None:
        """Drops the pair rates of an endpoint, so that its row can be reused."""
        self._pairs.pop(row, None)
        for rates in self._pairs.values():
            rates[row] = math.nan

    def links_between(self, source: int, destination: int) -> tuple[int, int]:
        """Returns the sender's and the receiver's link."""
        local = int(self._hosts[source] == self._hosts[destination])
        return 2 * source + local, 2 * destination + local

    def all_links(self) -> Links:
        """Returns all links in the form that `flows.c` expects."""
        links = self._links
        if links is None or links.out_rates is not self.out_rates:
            links = self._links = Links(self._hosts, self.out_rates, self.in_rates)
        return links

    def measured(self, source: int) -> Floats | None:
        """Returns the measured rates from a source to every row, NaN = not measured; None if no pair was measured."""
        return self._pairs.get(source)

    def alone(self, source: int, destination: int) -> float:
        """Returns the bytes per second of a pair without other traffic."""
        measured = self._pairs.get(source)
        if measured is not None and not math.isnan(own := float(measured[destination])):
            return own
        out, into = self.links_between(source, destination)
        return min(float(self.out_rates[out]), float(self.in_rates[into]))

    def observe(self, source: int, destination: int, nbytes: float, alone_s: float) -> None:
        """Records a transfer of `nbytes` that takes `alone_s` seconds without other traffic."""
        if nbytes < MEASURED_FROM or not 0.0 < alone_s < math.inf:
            return
        rate = nbytes / alone_s
        pairs = self._pairs.setdefault(source, np.full(self.num_rows, math.nan))
        known = float(pairs[destination])
        pairs[destination] = rate if math.isnan(known) else _mean(known, rate, _WEIGHT)
        out, into = self.links_between(source, destination)
        for rates, link in ((self.out_rates, out), (self.in_rates, into)):
            before = float(rates[link])
            weight = _LINK_RISE if rate > before else _LINK_FALL
            rates[link] = _mean(before, rate, weight)

    def _grow(self) -> None:
        added = Bandwidths(self.num_rows)
        self._hosts = np.concatenate((self._hosts, added._hosts))
        self.out_rates = np.concatenate((self.out_rates, added.out_rates))
        self.in_rates = np.concatenate((self.in_rates, added.in_rates))
        unknown = np.full(added.num_rows, math.nan)
        self._pairs = {row: np.concatenate((r, unknown)) for row, r in self._pairs.items()}

    def validate(self) -> None:
        for rates in (self.out_rates, self.in_rates):
            assert rates.shape == (2 * self.num_rows,)
            assert (rates > 0).all()
            assert np.isfinite(rates).all()
        for rates in self._pairs.values():
            assert rates.shape == (self.num_rows,)
            assert (rates[~np.isnan(rates)] > 0).all()


def _mean(known: float, newest: float, weight: float) -> float:
    """Returns the running mean, of logarithms because rates differ by factors."""
    step = math.log(newest / known)
    return known * math.exp(weight * min(max(step, -_CLIP), _CLIP))
