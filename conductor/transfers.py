"""Prefixes on their way from store nodes to workers, and how long new ones take beside them. Pure; knows no policy.

A placement's reads are flows from its decision to its first token or its end. Each link is shared equally by the flows
on it, and a flow moves at the lesser share of its two ends, never faster than its pair does alone. A flow whose bytes
should all have arrived delays nobody any more, so a lost report costs nothing. A new flow's time is that of its
busiest link, where it and every flow there get equal shares until it is done:

    t(b) = max(b / pair, (b + Σ_out min(left, b)) / out, (b + Σ_in min(left, b)) / in)

exact where one link is the bottleneck of all its flows and nothing comes later. The arithmetic is
`flows.c`; rates are those of `conductor.cost.bandwidth`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from conductor.columns import Floats, Ints
from conductor.cost.bandwidth import Bandwidths
from conductor.native.kernels import ALONE, FLOW_COLUMNS, INTO, LEFT, OUT, flow_kernel
from protocol.ids import RequestId

# The clock ticks this coarsely: moving all flows on costs as much as a placement, and a prefix takes longer.
TICK_S = 0.005
_HOST_MASK = (1 << 62) - 1  # of a digest, to fit into a column of signed numbers
_FIRST_ROWS = 32

_Key = tuple[RequestId, int]


class Transfers:
    """Flows of all requests in flight, a row each. Times are monotonic seconds and never go back.

    An endpoint has a number, its `link`, for as long as it is a member; its table says which.
    """

    def __init__(self) -> None:
        self._rates = Bandwidths()
        self._free: list[int] = []
        self._num_links = 0
        self._rows = np.zeros((_FIRST_ROWS, FLOW_COLUMNS))
        self._keys: list[_Key] = []  # by row
        self._row: dict[_Key, int] = {}
        self._reads: dict[RequestId, int] = {}  # how many flows a request has
        self._ended: list[_Key] = []  # flows that still have rows
        self._now = 0.0
        self._kernel = flow_kernel()

    def join(self, host: int, bytes_per_s: float, local_bytes_per_s: float) -> int:
        """The link of a new endpoint. `host`: a digest; rates as registered, 0 = not measured."""
        if not self._free:
            self._free.append(self._num_links)
            self._num_links += 1
        link = self._free.pop()
        self._rates.join(link, host & _HOST_MASK, bytes_per_s, local_bytes_per_s)
        return link

    def leave(self, link: int) -> None:
        """The endpoint is gone, and with it what was on its way."""
        ends = self._used()[:, (OUT, INTO)] // 2
        touching = np.flatnonzero((ends == link).any(axis=1))
        for key in [self._keys[row] for row in touching.tolist()]:
            self._discard(key)
        self._rates.leave(link)
        self._free.append(link)

    def begin(self, request_id: RequestId, reads: Sequence[tuple[int, float]], target: int, now: float) -> None:
        """`reads`: link and bytes of each source. No flow of this request is under way."""
        if not reads:
            return
        self._move_to(now)
        for number, (source, nbytes) in enumerate(reads):
            if source != target and nbytes > 0:
                self._add((request_id, number), source, target, nbytes)
        self._reads[request_id] = len(reads)

    def end(self, request_id: RequestId) -> None:
        """Its prefix is there, or nobody wants it any more. Unknown ones are ignored. When the first token comes says
        nothing of when the bytes came, so that no rate is learned from it."""
        self._ended += ((request_id, number) for number in range(self._reads.pop(request_id, 0)))

    def seconds(self, source: int, targets: Ints, nbytes: Floats, now: float) -> Floats:
        """From one endpoint to each of different others as if it were the only new flow; shapes [N]. Nothing to move,
        and moving to itself, take no time."""
        self._move_to(now)
        rates = self._rates
        return self._kernel.seconds(self._used(), rates.all_links(), source, targets, nbytes, rates.measured(source))

    def measured(self, source: int, target: int, nbytes: float, seconds: float) -> None:
        """An instance saw so many bytes pass in so much time, in which some were always under way."""
        self._rates.observe(source, target, nbytes, seconds)

    def alone(self, source: int, target: int) -> float:
        """Bytes per second without other traffic."""
        return self._rates.alone(source, target)

    def _move_to(self, now: float) -> None:
        """Also takes out what has ended since the last question."""
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
        links, alone = self._rates.links_between(source, target), self._rates.alone(source, target)
        self._rows[row] = (*links, nbytes, alone)

    def _discard(self, key: _Key) -> None:
        """The last flow takes its row. Unknown ones are ignored."""
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
