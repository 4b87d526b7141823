"""How fast bytes move between two endpoints when nothing else does: measured per pair, else per end, else a default.

An endpoint is a row number that its user gives out. It has two links in each direction, since what goes to its own
host is a copy in memory and what goes elsewhere passes its network: link = 2 · row + (1 within a host, 0 beyond).
Rates are running means of logarithms with a clipped step, so that one stall does not count for much. Of a link they
rise faster than they fall: what is slower may be so at its other end. Pure; knows no flows, instances or time.
"""

from __future__ import annotations

import math

import numpy as np

from conductor.columns import Floats
from conductor.native.kernels import Links

# Between hosts, until an instance has measured its own: what one TCP stream between two Python processes carries.
DEFAULT_BYTES_PER_S = 1e9
# Within a host, through shared memory: one copy. Half of what a core copies into prefaulted pages.
LOCAL_BYTES_PER_S = 5e9
# What is smaller measures a round trip, not a bandwidth.
MEASURED_FROM = 64 << 10

_WEIGHT = 0.2  # of the newest transfer in a pair's mean, as in `correction`
_LINK_RISE, _LINK_FALL = 0.5, 0.05
_CLIP = math.log(4.0)


class Bandwidths:
    """Rates of up to as many endpoints as were asked for; grows by doubling."""

    def __init__(self, num_rows: int = 64) -> None:
        self._hosts = np.zeros(num_rows, np.int64)
        self.out_rates = np.tile((DEFAULT_BYTES_PER_S, LOCAL_BYTES_PER_S), num_rows)
        self.in_rates = self.out_rates.copy()
        # The three columns, made once: they move only when they grow.
        self._links: Links | None = None
        self._pairs: dict[int, Floats] = {}  # source → rate to each row; NaN = not measured

    @property
    def num_rows(self) -> int:
        return len(self._hosts)

    def join(self, row: int, host: int, bytes_per_s: float, local_bytes_per_s: float) -> None:
        """A new endpoint on machine `host`. Rates: of its network and within its host; 0 = not measured."""
        while row >= self.num_rows:
            self._grow()
        self.leave(row)
        self._hosts[row] = host
        rates = (bytes_per_s or DEFAULT_BYTES_PER_S, local_bytes_per_s or LOCAL_BYTES_PER_S)
        self.out_rates[2 * row : 2 * row + 2] = self.in_rates[2 * row : 2 * row + 2] = rates

    def leave(self, row: int) -> None:
        """Forgets what was measured with it; the row may be given to another."""
        self._pairs.pop(row, None)
        for rates in self._pairs.values():
            rates[row] = math.nan

    def links_between(self, source: int, destination: int) -> tuple[int, int]:
        """The sender's and the receiver's link."""
        local = int(self._hosts[source] == self._hosts[destination])
        return 2 * source + local, 2 * destination + local

    def all_links(self) -> Links:
        """As `flows.c` takes them."""
        links = self._links
        if links is None or links.out_rates is not self.out_rates:
            links = self._links = Links(self._hosts, self.out_rates, self.in_rates)
        return links

    def measured(self, source: int) -> Floats | None:
        """Rates from this source to every row, NaN = not measured; None: no pair was."""
        return self._pairs.get(source)

    def alone(self, source: int, destination: int) -> float:
        """Bytes per second without other traffic."""
        measured = self._pairs.get(source)
        if measured is not None and not math.isnan(own := float(measured[destination])):
            return own
        out, into = self.links_between(source, destination)
        return min(float(self.out_rates[out]), float(self.in_rates[into]))

    def observe(self, source: int, destination: int, nbytes: float, alone_s: float) -> None:
        """`nbytes` took what would have been `alone_s` without other traffic."""
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
    """Of logarithms, since rates differ by factors."""
    step = math.log(newest / known)
    return known * math.exp(weight * min(max(step, -_CLIP), _CLIP))
