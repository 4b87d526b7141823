"""Prefix transfers in flight from store nodes to workers, and the predicted time of new ones. Pure; knows no policy.

A placement's reads are flows from its decision until its first token or its end. The flows on a link share it equally.
A flow moves at the smaller share of its two ends, and never faster than its pair does alone. A flow whose bytes should
all have arrived delays no other flow, so a lost report has no effect. The time of a new flow is that of its busiest
link, where it and every other flow get equal shares until it is done:

    t(b) = max(b / pair, (b + Σ_out min(left, b)) / out, (b + Σ_in min(left, b)) / in)

This is exact if one link is the bottleneck of all its flows and no flow starts later. The arithmetic is in `flows.c`;
rates come from `Bandwidths`.
"""

import math
from collections.abc import Sequence

import numpy as np

from moonserve.conductor.prediction.c_bindings import ALONE, FLOW_COLUMNS, INTO, LEFT, OUT, Links, flow_kernel
from moonserve.conductor.prediction.instance_table import Floats, Ints
from moonserve.protocol.request import RequestId

# Between hosts, if an instance did not measure: the rate of one TCP stream between two Python processes.
DEFAULT_BYTES_PER_S = 1e9
# Within a host, by one copy through shared memory: half the rate at which a core copies into prefaulted pages.
LOCAL_BYTES_PER_S = 5e9
# A smaller transfer measures a round trip, not a bandwidth.
MEASURED_FROM = 64 << 10

_WEIGHT = 0.2  # of the newest transfer in a pair's mean, as in `compute_time.DecodeCorrection`
_LINK_RISE, _LINK_FALL = 0.5, 0.05
_CLIP = math.log(4.0)


class Bandwidths:
    """Bandwidth between two endpoints without other traffic: measured per pair, else per link, else a default.

    An endpoint is a row number assigned by the caller. It has two links in each direction, because traffic within its
    host is a memory copy and other traffic passes its network: link = 2 · row + (1 within a host, 0 beyond). Rates are
    running means of logarithms with a clipped step, so that one stall counts little. The rate of a link rises faster
    than it falls, since a slow transfer may be slow at its other end. The number of rows grows by doubling.
    """

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

    def uncontended_rate(self, source: int, destination: int) -> float:
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


# Resolution of the clock: advancing all flows costs as much as a placement, and a prefix transfer takes longer.
TICK_S = 0.005
_HOST_MASK = (1 << 62) - 1  # makes a host digest fit into a signed column
_FIRST_ROWS = 32

_Key = tuple[RequestId, int]


class Transfers:
    """Flows of all requests in flight, one row each. Times are monotonic seconds and never go back.

    An endpoint has a number, its `link`, while it is a member; it is in the column `link` of its table.
    """

    def __init__(self) -> None:
        self._rates = Bandwidths()
        self._free: list[int] = []
        self._num_links = 0
        self._rows = np.zeros((_FIRST_ROWS, FLOW_COLUMNS))
        self._keys: list[_Key] = []  # by row
        self._row: dict[_Key, int] = {}
        self._reads: dict[RequestId, int] = {}  # number of reads of a request
        self._ended: list[_Key] = []  # flows that still have rows
        self._now = 0.0
        self._kernel = flow_kernel()

    def add_endpoint(self, host: int, bytes_per_s: float, local_bytes_per_s: float) -> int:
        """Adds an endpoint and returns its link. `host`: a digest; rates as registered, 0 = not measured."""
        if not self._free:
            self._free.append(self._num_links)
            self._num_links += 1
        link = self._free.pop()
        self._rates.join(link, host & _HOST_MASK, bytes_per_s, local_bytes_per_s)
        return link

    def remove_endpoint(self, link: int) -> None:
        """Removes an endpoint and all its flows."""
        ends = self._used()[:, (OUT, INTO)] // 2
        touching = np.flatnonzero((ends == link).any(axis=1))
        for key in [self._keys[row] for row in touching.tolist()]:
            self._discard(key)
        self._rates.leave(link)
        self._free.append(link)

    def begin(self, request_id: RequestId, reads: Sequence[tuple[int, float]], target: int, now: float) -> None:
        """Starts the flows of a request that has none yet. `reads`: link and bytes of each source."""
        if not reads:
            return
        self._move_to(now)
        for number, (source, nbytes) in enumerate(reads):
            if source != target and nbytes > 0:
                self._add((request_id, number), source, target, nbytes)
        self._reads[request_id] = len(reads)

    def end(self, request_id: RequestId) -> None:
        """Ends the flows of a request whose prefix arrived or is not needed any more. Unknown ids are ignored. No rate
        is learned here, since the first token does not show when the bytes arrived."""
        self._ended += ((request_id, number) for number in range(self._reads.pop(request_id, 0)))

    def seconds(self, source: int, targets: Ints, nbytes: Floats, now: float) -> Floats:
        """Returns the seconds of a flow from `source` to each target, as if it were the only new one. Targets are
        distinct; shapes [N]. A flow without bytes, or from an endpoint to itself, takes no time."""
        self._move_to(now)
        rates = self._rates
        return self._kernel.seconds(self._used(), rates.all_links(), source, targets, nbytes, rates.measured(source))

    def observe(self, source: int, target: int, nbytes: float, seconds: float) -> None:
        """Records a measured rate: `nbytes` in `seconds`, during which some were always in flight."""
        self._rates.observe(source, target, nbytes, seconds)

    def uncontended_rate(self, source: int, target: int) -> float:
        """Returns the bytes per second of a pair without other traffic."""
        return self._rates.uncontended_rate(source, target)

    def _move_to(self, now: float) -> None:
        """Advances all flows to the clock tick of `now` and removes flows that have ended."""
        tick = math.floor(now / TICK_S) * TICK_S
        if tick > self._now:
            if self._keys:
                self._kernel.advance(self._used(), self._rates.all_links(), tick - self._now)
            self._now = tick
        for key in self._ended:
            self._discard(key)
        self._ended.clear()

    def _used(self) -> Floats:
        return self._rows[: len(self._keys)]

    def _add(self, key: _Key, source: int, target: int, nbytes: float) -> None:
        row = len(self._keys)
        if row == len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
        self._row[key] = row
        self._keys.append(key)
        links, alone = self._rates.links_between(source, target), self._rates.uncontended_rate(source, target)
        self._rows[row] = (*links, nbytes, alone)

    def _discard(self, key: _Key) -> None:
        """Removes a flow; the last one moves into its row. Unknown keys are ignored."""
        row = self._row.pop(key, None)
        if row is None:
            return
        last_key = self._keys.pop()
        if row < len(self._keys):
            self._keys[row] = last_key
            self._row[last_key] = row
            self._rows[row] = self._rows[len(self._keys)]

    def validate(self) -> None:
        rows = self._used()
        assert self._row == {key: row for row, key in enumerate(self._keys)}
        assert (rows[:, LEFT] >= 0.0).all()
        assert (rows[:, ALONE] > 0.0).all()
        self._rates.validate()
        assert len(self._keys) <= sum(self._reads.values()) + len(self._ended)
        assert sorted(set(self._free)) == sorted(self._free), "a link was given back twice"
        assert all(0 <= link < self._num_links for link in self._free)
