"""Predictions at prefill instances and waits in their queues: compiled where there is a compiler.

What the columns mean is said in `conductor.policies.base`; the twins, in numpy and in Python, are in
`conductor.policies.least_added_delay`. Keeps nothing between two calls.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from conductor.native.base import FLAGS, Floats, Ints, address_of
from protocol.native import CompilerError, load_library, shared_cache

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("prefills.c")
_pointer, _number, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Columns(NamedTuple):
    """Of `Offers`, a row per instance."""

    device_blocks: Ints
    prefix_blocks: Ints
    queue_s: Floats
    local_s_per_block: Floats
    remote_s_per_block: Floats
    c0: Floats
    c1: Floats
    c2: Floats


class Patience(NamedTuple):
    """How long a prompt yields: `conductor.policies.least_added_delay.Terms`, as numbers."""

    patience: float
    keeps_objective: float  # 0 or 1
    prices: float  # likewise
    steepness: float
    late: float
    late_patience: float
    counts_delayed: float  # 0 or 1
    copy: float


class QueueRecord(ctypes.Structure):
    """`Queue` of prefills.c: one instance's queue. Who fills it keeps what it points to."""

    _fields_ = (
        ("places", _pointer),
        ("sums", _pointer),
        ("count", _double),
        ("is_running", _double),
        ("running_place", _double),
        ("running_s", _double),
        ("began_at", _double),
        ("step_s", _double),
        ("surplus_s", _double),
    )


class _Columns(ctypes.Structure):
    """`Offers` of prefills.c."""

    _fields_ = tuple((name, _pointer) for name in Columns._fields)


def _at(columns: Columns) -> _Columns:
    return _Columns(*map(address_of, columns))


class PrefillLibrary:
    """prefills.c; short calls, which keep the GIL. Raises CompilerError where it cannot be had."""

    def __init__(self, folder: Path | None) -> None:
        loaded = load_library(SOURCE, (*FLAGS, "-lm"), folder)
        library = ctypes.PyDLL(loaded._name, handle=loaded._handle)
        self._faster, self._weigh = library.prefills_faster, library.prefills_weigh
        self._faster.argtypes = (
            ctypes.POINTER(_Columns),
            _number,
            _double,
            _double,
            _number,
            _pointer,
            _pointer,
        )
        self._weigh.argtypes = (
            *(_pointer, _pointer, _number, _pointer, _pointer, _number),
            *(_pointer, _double, _double, _pointer),
        )
        self._faster.restype = self._weigh.restype = None

    def faster(
        self, columns: Columns, num_tokens: int, block_size: int, best_blocks: int
    ) -> tuple[Ints, Floats]:
        """Blocks to re-use, where missing ones are fetched if that is faster. Rows: load_s, transfer_s, prefill_s,
        ttft_s, and what computing the missing blocks takes."""
        size = len(columns.queue_s)
        reuse, found = np.empty(size, np.int64), np.empty((5, size))
        self._faster(
            *(ctypes.byref(_at(columns)), size, num_tokens, block_size, best_blocks),
            *(address_of(reuse), address_of(found)),
        )
        return reuse, found

    def weigh(
        self,
        found: Floats,
        queue_s: Floats,
        rows: Ints,
        records: Sequence[QueueRecord],
        terms: Floats,
        *,
        now: float,
        slo_s: float,
    ) -> Floats:
        """`found`: of `faster`; `records`: the queues of these rows; `terms`: a `Patience`. Rows: rank, queue_s,
        added_s, ttft_s, score."""
        size = len(queue_s)
        places = np.array([ctypes.addressof(record) for record in records], np.uint64)
        weighed = np.empty((5, size))
        self._weigh(
            *(address_of(found), address_of(queue_s), size),
            *(address_of(rows), address_of(places), len(records)),
            *(address_of(terms), now, slo_s, address_of(weighed)),
        )
        return weighed


@functools.cache
def prefill_library() -> PrefillLibrary | None:
    """Of this process: code, like an imported module, so it is loaded once. The first call on a machine takes as long
    as the compiler does; None: there is none, and numpy does the same."""
    try:
        return PrefillLibrary(shared_cache())
    except CompilerError as error:
        _log.warning("compiled predictions are not available, using numpy: %s", error)
        return None
