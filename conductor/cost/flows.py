"""Flows on links, as columns: what each has left, moved on in time by equal shares.

Owns the dense table and its arithmetic. Its rule: bytes left only ever shrink, and a flow without bytes left has no
share. Between two changes every rate is constant, so that a step ends where the next flow has nothing left, and a flow
ends once. Pure; knows neither rates of pairs nor what a link is, and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedFlow:
    source: int
    destination: int
    nbytes: float
    alone_s: float  # that it would have taken without other traffic, by the shares it had


class FlowTable:
    """Adding and removing are O(1); a query and each flow's end one pass over the columns."""

    def __init__(self, capacity: int = 32) -> None:
        self._slots: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []  # by slot
        self._ends = np.zeros((capacity, 2), np.int64)  # source, destination
        self._links = np.zeros((capacity, 2), np.int64)  # out, in
        self._bytes = np.zeros(capacity)
        self._left = np.zeros(capacity)
        self._alone = np.zeros(capacity)  # bytes per second of the pair without other traffic
        self._alone_s = np.zeros(capacity)
        self._rates: Floats | None = None  # None: what they depend on has changed
        self._shares: Floats = np.zeros(0)  # set with _rates

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slots

    def left(self, key: Hashable) -> float:
        return float(self._left[self._slots[key]])

    def at(self, row: int) -> Sequence[Hashable]:
        """Keys of the flows from and to an endpoint."""
        touching = np.flatnonzero((self._ends[: len(self)] == row).any(axis=1))
        return [self._keys[slot] for slot in touching.tolist()]

    def add(
        self,
        key: Hashable,
        ends: tuple[int, int],
        links: tuple[int, int],
        nbytes: float,
        alone: float,
    ) -> None:
        slot = len(self)
        if slot == len(self._left):
            self._grow()
        self._slots[key] = slot
        self._keys.append(key)
        self._ends[slot], self._links[slot] = ends, links
        self._bytes[slot] = self._left[slot] = nbytes
        self._alone[slot], self._alone_s[slot] = alone, 0.0
        self._rates = None

    def remove(self, key: Hashable) -> EndedFlow | None:
        """None when it is not there. The last flow takes its place."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        source, destination = self._ends[slot].tolist()
        ended = EndedFlow(
            source=source,
            destination=destination,
            nbytes=float(self._bytes[slot]),
            alone_s=float(self._alone_s[slot]),
        )
        last_key = self._keys.pop()
        if last_key != key:
            self._keys[slot] = last_key
            self._slots[last_key] = slot
            for column in self._columns():
                column[slot] = column[len(self)]
        self._rates = None
        return ended

    def forget_rates(self) -> None:
        """Links have become faster or slower."""
        self._rates = None

    # -- time

    def advance(self, seconds: float, out_rates: Floats, in_rates: Floats) -> None:
        """Lets `seconds` pass; rates are bytes per second of each link."""
        size = len(self)
        left, alone_s = self._left[:size], self._alone_s[:size]
        while size and seconds > 0.0:
            rates = self._share(out_rates, in_rates) if self._rates is None else self._rates
            times = np.divide(left, rates, out=np.full(size, math.inf), where=rates > 0.0)
            step_s = min(seconds, float(times.min()))
            left -= rates * step_s
            alone_s += self._shares * step_s
            done = (times <= step_s) & (rates > 0.0)
            if done.any():
                left[done] = 0.0  # exactly, or the next step would be without end
                self._rates = None
            np.maximum(left, 0.0, out=left)
            seconds -= step_s

    def _share(self, out_rates: Floats, in_rates: Floats) -> Floats:
        """Bytes per second of each flow. Its share of being alone counts on where bytes should have arrived but no
        end was reported: then it is slower than was thought, and still has to share."""
        size = len(self)
        moving = self._left[:size] > 0.0
        out, into = self._links[:size, 0], self._links[:size, 1]
        late = ~moving  # one more than those that are counted
        num_out = np.bincount(out, moving, len(out_rates))[out] + late
        num_in = np.bincount(into, moving, len(in_rates))[into] + late
        shares: Floats = np.minimum(out_rates[out] / num_out, in_rates[into] / num_in)
        shares = np.minimum(shares, self._alone[:size])
        self._shares = shares / self._alone[:size]
        self._rates = np.where(moving, shares, 0.0)
        return self._rates

    # -- questions

    def shared_out(self, links: Rows, nbytes: Floats) -> Floats:
        """Σ min(left, nbytes[i]) over the flows that leave by links[i]; few different links, such as one source's."""
        total = np.zeros(len(links))
        for link in set(links.tolist()):
            left = np.sort(self._left[: len(self)][self._links[: len(self), 0] == link])
            sums = np.concatenate(([0.0], np.cumsum(left)))
            asked = links == link
            smaller = np.searchsorted(left, nbytes[asked], side="right")
            total[asked] = sums[smaller] + (len(left) - smaller) * nbytes[asked]
        return total

    def shared_in(self, links: Rows, nbytes: Floats, num_links: int) -> Floats:
        """Σ min(left, nbytes[i]) over the flows that arrive by links[i]; the links are different ones."""
        asked = np.zeros(num_links)
        asked[links] = nbytes
        into = self._links[: len(self), 1]
        shared = np.minimum(self._left[: len(self)], asked[into])
        totals: Floats = np.bincount(into, shared, num_links).astype(float)
        return totals[links]

    # -- keeping

    def _columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        return (self._ends, self._links, self._bytes, self._left, self._alone, self._alone_s)

    def _grow(self) -> None:
        doubled = [np.concatenate((column, np.zeros_like(column))) for column in self._columns()]
        self._ends, self._links, self._bytes, self._left, self._alone, self._alone_s = doubled

    def validate(self) -> None:
        size = len(self)
        assert self._slots == {key: slot for slot, key in enumerate(self._keys)}
        left = self._left[:size]
        assert ((left >= 0.0) & (left <= self._bytes[:size])).all()
        assert (self._alone[:size] > 0.0).all()
        assert (self._alone_s[:size] >= 0.0).all()
