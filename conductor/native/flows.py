"""Moving flows on, and new flows' times beside them: compiled where there is a compiler, else in numpy.

A flow is a row of `FLOW_COLUMNS` numbers; the table and its meaning are `conductor.cost.flows`. Endpoints, links and
rates are those of `conductor.cost.bandwidth`. Neither way keeps anything between two calls but memory to work in.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from conductor.native.base import FLAGS, Floats, Ints, address_of
from protocol.native import CompilerError, load_library, shared_cache

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("flows.c")
FROM, TO, OUT, INTO, BYTES, LEFT, ALONE, ALONE_S = range(8)
FLOW_COLUMNS = 8


class Links(NamedTuple):
    """Of all endpoints; two links in each direction for one of them."""

    hosts: Ints  # [endpoints]
    out_rates: Floats  # [links], bytes per second
    in_rates: Floats


class FlowKernel(Protocol):
    """Rows are [flows, FLOW_COLUMNS], contiguous; their links are among those given."""

    def advance(self, rows: Floats, links: Links, seconds: float) -> None:
        """Lets seconds pass: changes what is left, and the time alone."""

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


class PythonFlows:
    """`FlowKernel` in numpy."""

    def advance(self, rows: Floats, links: Links, seconds: float) -> None:
        left, alone_s, alone = rows[:, LEFT], rows[:, ALONE_S], rows[:, ALONE]
        while len(rows) and seconds > 0.0:
            shares = _shares(rows, links)
            rates = np.where(left > 0.0, shares, 0.0)
            times = np.divide(left, rates, out=np.full(len(rows), math.inf), where=rates > 0.0)
            step_s = min(seconds, float(times.min()))
            alone_s += shares / alone * step_s
            left -= rates * step_s
            left[times <= step_s] = 0.0  # exactly, or the next step would be without end
            np.maximum(left, 0.0, out=left)
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
        local = (links.hosts[targets] == links.hosts[source]).astype(np.int64)
        out, into = 2 * source + local, 2 * targets + local
        sent, received = _leaving(rows, out, nbytes), _arriving(rows, into, nbytes)
        seconds = np.maximum(
            (nbytes + sent) / links.out_rates[out], (nbytes + received) / links.in_rates[into]
        )
        if measured is not None:  # else a pair is as fast as the slower of its links
            links_alone = np.minimum(links.out_rates[out], links.in_rates[into])
            own = measured[targets]
            seconds = np.maximum(seconds, nbytes / np.where(np.isnan(own), links_alone, own))
        moved: Floats = np.where((nbytes > 0.0) & (targets != source), seconds, 0.0)
        return moved


class NativeFlows:
    """`FlowKernel` over flows.c. Raises CompilerError where it cannot be had."""

    def __init__(self, folder: Path | None) -> None:
        loaded = load_library(SOURCE, FLAGS, folder)
        library = ctypes.PyDLL(loaded._name, handle=loaded._handle)  # short calls keep the GIL
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self._advance = library.flows_advance
        self._advance.argtypes = pointer, number, pointer, number, real, pointer
        self._advance.restype = None
        self._seconds = library.flows_seconds
        self._seconds.argtypes = (
            *(pointer, number, pointer, number, number),
            *(pointer, pointer, number, pointer, pointer, pointer, pointer),
        )
        self._seconds.restype = None
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


class _Links(ctypes.Structure):
    """`Links` of flows.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in Links._fields)


def _shares(rows: Floats, links: Links) -> Floats:
    """Bytes per second of each flow. One that should have arrived but did not report its end is slower than was
    thought, and still has to share: it counts as one more than those that are counted."""
    moving = rows[:, LEFT] > 0.0
    out, into = rows[:, OUT].astype(np.int64), rows[:, INTO].astype(np.int64)
    num_links = len(links.out_rates)
    num_out = np.bincount(out, moving, num_links)[out] + ~moving
    num_in = np.bincount(into, moving, num_links)[into] + ~moving
    shares = np.minimum(links.out_rates[out] / num_out, links.in_rates[into] / num_in)
    return np.minimum(shares, rows[:, ALONE])


def _leaving(rows: Floats, links: Ints, nbytes: Floats) -> Floats:
    """Σ min(left, nbytes[i]) over the flows that leave by links[i]; few different links, such as one source's."""
    total = np.zeros(len(links))
    for link in set(links.tolist()):
        left, asked = rows[rows[:, OUT] == link, LEFT], links == link
        total[asked] = np.minimum(left[:, None], nbytes[asked]).sum(axis=0)
    return total


def _arriving(rows: Floats, links: Ints, nbytes: Floats) -> Floats:
    """Σ min(left, nbytes[i]) over the flows that arrive by links[i]; the links are different ones."""
    into = rows[:, INTO].astype(np.int64)
    num_links = max(int(links.max(initial=0)), int(into.max(initial=0))) + 1
    asked = np.zeros(num_links)
    asked[links] = nbytes
    shared = np.minimum(rows[:, LEFT], asked[into])
    totals: Floats = np.bincount(into, shared, num_links).astype(float)
    return totals[links]


@functools.cache
def flow_kernel() -> FlowKernel:
    """The one of this process: code, like an imported module, so it is loaded once. The first call on a machine takes
    as long as the compiler does."""
    try:
        return NativeFlows(shared_cache())
    except CompilerError as error:
        _log.warning("compiled flows are not available, using numpy: %s", error)
        return PythonFlows()
