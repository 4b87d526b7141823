"""Moving flows on, and new flows' times beside them: compiled where there is a compiler, else in numpy.

A flow is a row of `FLOW_COLUMNS` numbers (`conductor.transfers`); links and rates are those of
`conductor.cost.bandwidth`. Neither way keeps anything between two calls but memory to work in.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints
from conductor.native.base import NUMBER, POINTER, REAL, address_of, library, pointers

OUT, INTO, LEFT, ALONE = range(4)  # the sender's and the receiver's link, bytes, bytes per second
FLOW_COLUMNS = 4


class Links(NamedTuple):
    """Of all endpoints; two links in each direction for one of them."""

    hosts: Ints  # [endpoints]
    out_rates: Floats  # [links], bytes per second
    in_rates: Floats


class Flows:
    """In numpy. Rows are [flows, FLOW_COLUMNS], contiguous; their links are among those given."""

    def advance(self, rows: Floats, links: Links, seconds: float) -> None:
        """Lets seconds pass: changes what is left."""
        left = rows[:, LEFT]
        while seconds > 0.0 and (moving := np.flatnonzero(left > 0.0)).size:
            out, into = rows[moving, OUT].astype(np.int64), rows[moving, INTO].astype(np.int64)
            sent = links.out_rates[out] / np.bincount(out)[out]
            received = links.in_rates[into] / np.bincount(into)[into]
            rates = np.minimum(np.minimum(sent, received), rows[moving, ALONE])
            times = left[moving] / rates
            step_s = min(seconds, float(times.min()))
            rest = np.maximum(left[moving] - rates * step_s, 0.0)
            left[moving] = np.where(
                times <= step_s, 0.0, rest
            )  # exactly, or the next step would be without end
            seconds -= step_s

    def seconds(
        self,
        rows: Floats,
        links: Links,
        source: int,
        targets: Ints,
        nbytes: Floats,
        measured: Floats | None,
    ) -> Floats:
        """From one endpoint to each of different others, as if it were the only new flow; shapes [targets].

        `measured`: bytes per second of the source to every endpoint, NaN where that is not known."""
        local = (links.hosts[targets] == links.hosts[source]).astype(np.int64)
        out, into = 2 * source + local, 2 * targets + local
        out_rates, in_rates = links.out_rates[out], links.in_rates[into]
        alone = np.minimum(out_rates, in_rates)
        if measured is not None:
            alone = np.where(np.isnan(measured[targets]), alone, measured[targets])
        # min(left, nbytes) of each flow that shares an end with a new one; shape [targets, flows].
        shared = np.minimum(rows[:, LEFT], nbytes[:, None])
        sent = (shared * (rows[:, OUT] == out[:, None])).sum(axis=1)
        received = (shared * (rows[:, INTO] == into[:, None])).sum(axis=1)
        # A link is not slower than one of its pairs was.
        ends = (
            (nbytes + sent) / np.maximum(out_rates, alone),
            (nbytes + received) / np.maximum(in_rates, alone),
        )
        seconds = np.maximum(np.maximum(*ends), nbytes / alone)
        moved: Floats = np.where((nbytes > 0.0) & (targets != source), seconds, 0.0)
        return moved


class NativeFlows(Flows):
    """In flows.c."""

    def __init__(self, compiled: ctypes.PyDLL) -> None:
        self._advance, self._seconds = compiled.flows_advance, compiled.flows_seconds
        self._advance.argtypes = POINTER, NUMBER, POINTER, NUMBER, REAL, POINTER
        self._seconds.argtypes = (
            *(POINTER, NUMBER, POINTER, NUMBER, NUMBER),
            *(POINTER, POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER),
        )
        self._advance.restype = self._seconds.restype = None
        self._scratch = np.zeros(0)
        self._links: Links | None = None  # the last ones, whose addresses are known
        self._known, self._known_at, self._scratch_at = _Links(), 0, 0

    def advance(self, rows: Floats, links: Links, seconds: float) -> None:
        self._prepare(len(rows), links)
        self._advance(
            *(address_of(rows), len(rows), self._known_at, len(links.out_rates)),
            *(seconds, self._scratch_at),
        )

    def seconds(
        self,
        rows: Floats,
        links: Links,
        source: int,
        targets: Ints,
        nbytes: Floats,
        measured: Floats | None,
    ) -> Floats:
        self._prepare(len(rows), links)
        into, seconds = np.empty_like(targets), np.empty_like(nbytes)
        self._seconds(
            *(address_of(rows), len(rows), self._known_at, len(links.out_rates), source),
            *(address_of(targets), address_of(nbytes), len(targets)),
            None if measured is None else address_of(measured),
            *(self._scratch_at, address_of(into), address_of(seconds)),
        )
        return seconds

    def _prepare(self, num_rows: int, links: Links) -> None:
        if links is not self._links:
            self._links = links
            self._known = _Links(*map(address_of, links))
            self._known_at = ctypes.addressof(self._known)
        needed = 2 * (len(links.out_rates) + num_rows)
        if len(self._scratch) < needed:
            self._scratch = np.zeros(2 * needed)
            self._scratch_at = address_of(self._scratch)


_Links = pointers("_Links", Links._fields)


@functools.cache
def flow_kernel() -> Flows:
    """The one of this process."""
    compiled = library("flows")
    return Flows() if compiled is None else NativeFlows(compiled)
