"""Bindings to the C loops of a placement that would take too many numpy calls: flows, queues by rank, sequences.

C reads and writes numpy's memory. Python allocates all memory and checks all bounds; only one thread uses it. The
meaning of columns is documented where they are kept. Between calls this module keeps only scratch memory and addresses.
"""

import ctypes
import functools
import operator
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moonserve.conductor.prediction.instance_table import DecodeTable, Flags, Floats, Ints, Words
from moonserve.protocol.process.native_libraries import C_FLAGS, c_fields, load_library, shared_cache

_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_Place = ctypes.c_char * 0


@functools.cache
def _library(name: str) -> ctypes.PyDLL:
    """Loads NAME.c of this folder, once per process. Only the first call on a machine runs the compiler. Raises
    CompilerError."""
    loaded = load_library(Path(__file__).parent / "native" / f"{name}.c", C_FLAGS, shared_cache())
    return ctypes.PyDLL(loaded._name, handle=loaded._handle)  # keeps the GIL: the calls are short


def _function(library: str, name: str, *argument_types: Any) -> Any:
    function = getattr(_library(library), name)
    function.argtypes, function.restype = argument_types, None
    return function


def _pointers(name: str, fields: tuple[str, ...]) -> type[ctypes.Structure]:
    """Returns a C struct type whose fields are pointers to the columns of these names."""
    return type(name, (ctypes.Structure,), {"_fields_": [(field, _POINTER) for field in fields]})


def _address(column: npt.NDArray[Any]) -> int:
    """Returns the address of a writable, contiguous column; valid while the column exists. Raises TypeError if it is
    read-only or not contiguous."""
    # Takes 0.25 µs; numpy's `ctypes.data` takes 1.5 µs.
    memory: Any = column
    return ctypes.addressof(_Place.from_buffer(memory))


# ---- flows: rows of FLOW_COLUMNS numbers (`conductor.prediction.transfer_time`)

OUT, INTO, LEFT, ALONE = range(4)  # sender's link, receiver's link, bytes left, bytes per second without other traffic
FLOW_COLUMNS = 4


class Links(NamedTuple):
    """Link rates of all endpoints; each endpoint has two links per direction (`conductor.prediction.transfer_time`)."""

    hosts: Ints  # [endpoints]
    out_rates: Floats  # [links], bytes per second
    in_rates: Floats


_Links = _pointers("_Links", Links._fields)


class FlowKernel:
    """Binding of flows.c. Rows have shape [flows, FLOW_COLUMNS] and are contiguous; they name links of `links` only."""

    def __init__(self) -> None:
        self._advance = _function(
            "flows",
            "flows_advance",
            *(_POINTER, _NUMBER, _POINTER, _NUMBER, _REAL, _POINTER),
        )
        self._seconds = _function(
            "flows",
            "flows_seconds",
            *(_POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER),
            *(_POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _POINTER),
        )
        self._scratch = np.zeros(0)
        self._links: Links | None = None  # of the last call; their addresses are cached
        self._known, self._known_at, self._scratch_at = _Links(), 0, 0

    def advance(self, rows: Floats, links: Links, seconds: float) -> None:
        """Advances all flows by `seconds`: reduces their bytes left in place."""
        self._prepare(len(rows), links)
        self._advance(
            *(_address(rows), len(rows), self._known_at, len(links.out_rates)),
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
        """Returns the seconds of a new flow from `source` to each target, as if it were the only new one. Targets are
        distinct; shapes [targets]. `measured`: bytes per second from the source to every endpoint, NaN = unknown."""
        self._prepare(len(rows), links)
        into, seconds = np.empty_like(targets), np.empty_like(nbytes)
        self._seconds(
            *(_address(rows), len(rows), self._known_at, len(links.out_rates), source),
            *(_address(targets), _address(nbytes), len(targets)),
            None if measured is None else _address(measured),
            *(self._scratch_at, _address(into), _address(seconds)),
        )
        return seconds

    def _prepare(self, num_rows: int, links: Links) -> None:
        if links is not self._links:
            self._links = links
            self._known = _Links(*map(_address, links))
            self._known_at = ctypes.addressof(self._known)
        needed = 2 * (len(links.out_rates) + num_rows)
        if len(self._scratch) < needed:
            self._scratch = np.zeros(2 * needed)
            self._scratch_at = _address(self._scratch)


flow_kernel = functools.cache(FlowKernel)


# ---- prompts at prefill instances (`conductor.placement.policies.base`)


class QueueRecord(ctypes.Structure):
    """Struct `Queue` of prefills.c: one instance's queue. The `PrefillQueue` that fills it owns what it points to."""

    _fields_ = (
        *c_fields(_POINTER, "places sums"),
        *c_fields(_REAL, "count is_running running_place running_s began_at step_s surplus_s"),
    )


_Offers = _pointers(
    "_Offers",
    ("device_blocks", "prefix_blocks", "queue_s", "local_s", "remote_s", "c0", "c1", "c2"),
)


class PrefillKernel:
    """Binding of prefills.c."""

    def __init__(self) -> None:
        self._faster = _function(
            "prefills",
            "prefills_faster",
            *(ctypes.POINTER(_Offers), _NUMBER, _REAL, _REAL, _NUMBER, _POINTER, _POINTER),
        )
        self._weigh = _function(
            "prefills",
            "prefills_weigh",
            *(_POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _NUMBER),
            *(_POINTER, _POINTER, _REAL, _REAL, _POINTER, _REAL, _POINTER),
        )

    def faster(
        self, columns: Sequence[Ints | Floats], num_tokens: int, block_size: int, best_blocks: int
    ) -> tuple[Ints, Floats]:
        """Returns the blocks to re-use per instance, with missing blocks fetched if that is faster, and predicted times
        in rows: load_s, transfer_s, prefill_s, ttft_s, seconds to compute the missing blocks. `columns`: as in struct
        `Offers` of prefills.c."""
        size = len(columns[0])
        reuse, found = np.empty(size, np.int64), np.empty((5, size))
        offers = _Offers(*map(_address, columns))
        self._faster(
            *(ctypes.byref(offers), size, num_tokens, block_size, best_blocks),
            *(_address(reuse), _address(found)),
        )
        return reuse, found

    def weigh(
        self,
        found: Floats,
        queue_s: Floats,
        rows: Ints,
        queues: Words,
        terms: Floats,
        order: Floats | None,
        *,
        now: float,
        slo_s: float,
        limits: Floats | None,
        shift_s: float,
    ) -> Floats:
        """Returns in rows: rank, queue_s, added_s, ttft_s, score. `found`: result of `faster`; `queues`: addresses of
        the queue records of `rows`; `terms`, `order`: structs `Terms` and `ArrivalOrder` of prefills.c, which updates
        the order; `limits`, `shift_s`: as in `QueueWaits`."""
        size = len(queue_s)
        weighed = np.empty((5, size))
        self._weigh(
            *(_address(found), _address(queue_s), size),
            *(_address(rows), _address(queues), len(queues)),
            *(_address(terms), None if order is None else _address(order), now, slo_s),
            *(None if limits is None else _address(limits), shift_s, _address(weighed)),
        )
        return weighed


prefill_kernel = functools.cache(PrefillKernel)


# ---- sequences at decode instances (`conductor.prediction.decode_forecast`, `conductor.prediction.instance_table`)

NUM_SUMS = 3  # running sequences, tokens of their contexts, tokens that occupy blocks
_WEIGH_ARGUMENTS = struct.Struct("13d")  # `Question` of sequences.c


# Columns by slot, except the last two. `shapes`: what each sequence adds to the sums, [slots, NUM_SUMS, instants];
# `sums`: by instance number, [numbers, NUM_SUMS, instants].
SEQUENCES = (
    *("owner", "tokens", "most", "begins_at", "as_of", "generated", "step_s", "end_rate"),
    *("shapes", "sums", "instants"),
)
# Columns of the table of decode instances.
DECODES = ("number", "slots", "c0", "c1", "c2", "other_seqs", "other_tokens", "free_blocks")


class PredictedSteps(NamedTuple):
    """Predicted decode steps with the newcomer included; shapes [instances]."""

    num_seqs: Floats  # if it landed now
    context_tokens: Floats
    landing_seqs: Floats
    landing_tokens: Floats
    spare_blocks: Floats
    tbt_s: Floats
    landing_tbt_s: Floats
    later_tbt_s: Floats
    has_slot: Flags


_Sequences = _pointers("_Sequences", SEQUENCES)
_Decodes = _pointers("_Decodes", DECODES)
_columns_of = operator.attrgetter(*DECODES)


class SequenceKernel:
    """Binding of sequences.c to the columns of one outlook. Columns are contiguous; slots and numbers are in range."""

    def __init__(self) -> None:
        self._add = _function("sequences", "sequences_add", _POINTER, _NUMBER, _NUMBER)
        self._draw = _function(
            "sequences",
            "sequences_draw",
            *(_POINTER, _POINTER, _NUMBER, _NUMBER, ctypes.c_int32),
        )
        self._weigh = _function(
            "sequences",
            "sequences_weigh",
            *(_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER),
        )
        self._sums: Floats
        self._known = _Sequences()
        self._at = ctypes.addressof(self._known)
        self._num_instants = 0
        self._question = ctypes.create_string_buffer(_WEIGH_ARGUMENTS.size)
        self._decodes: tuple[Any, ...] | None = None  # of the last call; their addresses are cached
        self._known_decodes = _Decodes()

    def bind(self, columns: Sequence[npt.NDArray[Any]]) -> None:
        """Sets the columns, in the order of SEQUENCES. Must be called again whenever one of them is replaced."""
        self._sums, self._num_instants = columns[-2], len(columns[-1])
        for name, column in zip(SEQUENCES, columns, strict=True):
            setattr(self._known, name, _address(column))

    def add(self, slot: int) -> None:
        """Computes the shape of a new sequence and adds it to the sums."""
        self._add(self._at, slot, self._num_instants)

    def redraw(self, slots: Ints) -> None:
        """Computes the shapes of these slots again and updates the sums. Slots are distinct."""
        self._draw(self._at, _address(slots), len(slots), self._num_instants, 0)

    def draw(self, slots: Ints) -> None:
        """Computes all shapes and sums from scratch; `slots` are all slots in use."""
        self._sums[:] = 0.0
        self._draw(self._at, _address(slots), len(slots), self._num_instants, 1)

    def weigh(self, decodes: DecodeTable, question: Sequence[float]) -> PredictedSteps:
        """Returns the predicted steps of every instance. `question`: fields of struct `Question` of sequences.c."""
        _WEIGH_ARGUMENTS.pack_into(self._question, 0, *question)
        num_rows = len(decodes)
        found = np.empty((8, num_rows))
        has_slot = np.empty(num_rows, np.bool_)
        self._weigh(
            *(self._at, self._num_instants, ctypes.byref(self._bind_decodes(decodes)), num_rows),
            *(self._question, _address(found), _address(has_slot)),
        )
        return PredictedSteps._make((*found, has_slot))

    def _bind_decodes(self, decodes: DecodeTable) -> ctypes.Structure:
        columns, last = _columns_of(decodes), self._decodes
        if last is None or not all(map(operator.is_, columns, last)):
            self._decodes = columns
            self._known_decodes = _Decodes(*map(_address, columns))
        return self._known_decodes
