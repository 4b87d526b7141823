"""Predictions at prefill instances and waits in their queues: compiled where there is a compiler.

What the columns mean is said in `conductor.policies.base`; the twins, in numpy and in Python, are in
`conductor.policies.least_added_delay`. Keeps nothing between two calls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from conductor.columns import Floats, Ints
from conductor.native.base import NUMBER, POINTER, REAL, address_of, library, pointers


class QueueRecord(ctypes.Structure):
    """`Queue` of prefills.c: one instance's queue. The queue that fills it keeps what it points to."""

    _fields_ = (
        ("places", POINTER),
        ("sums", POINTER),
        ("count", REAL),
        ("is_running", REAL),
        ("running_place", REAL),
        ("running_s", REAL),
        ("began_at", REAL),
        ("step_s", REAL),
        ("surplus_s", REAL),
    )


_Offers = pointers(
    "_Offers",
    ("device_blocks", "prefix_blocks", "queue_s", "local_s", "remote_s", "c0", "c1", "c2"),
)


class PrefillLibrary:
    """prefills.c."""

    def __init__(self, compiled: ctypes.PyDLL) -> None:
        self._faster, self._weigh = compiled.prefills_faster, compiled.prefills_weigh
        self._faster.argtypes = (
            *(ctypes.POINTER(_Offers), NUMBER, REAL, REAL),
            *(NUMBER, POINTER, POINTER),
        )
        self._weigh.argtypes = (
            *(POINTER, POINTER, NUMBER, POINTER, POINTER, NUMBER),
            *(POINTER, REAL, REAL, POINTER),
        )
        self._faster.restype = self._weigh.restype = None

    def faster(
        self, columns: Sequence[Ints | Floats], num_tokens: int, block_size: int, best_blocks: int
    ) -> tuple[Ints, Floats]:
        """Blocks to re-use, where missing ones are fetched if that is faster. `columns`: those of `Offers` of
        prefills.c. Rows: load_s, transfer_s, prefill_s, ttft_s, and what computing the missing blocks takes."""
        size = len(columns[0])
        reuse, found = np.empty(size, np.int64), np.empty((5, size))
        self._faster(
            *(
                ctypes.byref(_Offers(*map(address_of, columns))),
                size,
                num_tokens,
                block_size,
                best_blocks,
            ),
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
        """`found`: of `faster`; `records`: the queues of these rows; `terms`: `Terms` of prefills.c. Rows:
        rank, queue_s, added_s, ttft_s, score."""
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
    """The one of this process; None: there is no compiler, and numpy does the same."""
    compiled = library("prefills")
    return None if compiled is None else PrefillLibrary(compiled)
