"""The data plane: bulk copies and stream I/O, one C call each, with the GIL released.

`data_plane()` loads `data_plane.c`, from the wheel or compiled once per machine. A `Flow` records the progress of both
directions of a socket; its layout is repeated in the C file. After IN_DONE or TIMEOUT, add more vectors or none and
pump again. Addresses are not checked: the caller ensures bounds and keeps memory alive. Knows no frames and no
segments.
"""

import ctypes
import functools
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.native_libraries import C_FLAGS, CompilerError, c_fields, load_library, shared_cache
from moonserve.transfer.memory.scatter import LIMIT, Rows

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SOURCE = Path(__file__).parents[1] / "native" / "data_plane.c"

IoVectors = npt.NDArray[np.uint64]
"""A `struct iovec` array: address and length of each piece. Shape (n, 2), C-contiguous, writable."""

Piece = tuple[int, int] | None
"""Address and length of one piece."""

MAX_IOVECS = 1024
"""Pieces per system call (IOV_MAX of Linux)."""

Words = npt.NDArray[np.uint64]

SEAL_BYTES = 8
UNSEALED = 1 << 62
"""Length of a piece of output whose 8 bytes are the number of bytes before it, above `SHORT_VALUE`. `pump` hashes those
while they are in the cache, and sends their XXH3-64 in place of the number."""
SHORT_VALUE = 240
"""Most bytes of a value that is not hashed on arrival: XXH3 has other rules for them (xxh3.h)."""

NO_VECTORS: IoVectors = np.empty((0, 2), np.uint64)


class PumpEnd(IntEnum):
    """Reason why `pump` returned."""

    IN_DONE = 1
    """The bytes requested by `Flow.receive` have arrived; output may be unfinished."""
    OUT_DONE = 2
    """All output is sent and no input was requested."""
    TIMEOUT = 3
    """The timeout has passed. Bytes moved so far count, and the next call continues from there."""
    HANGUP = 4
    """The peer has closed its side; nothing more arrives."""
    ERROR = 5
    """A system call failed; `FlowState.error` has the errno."""


_PUMP_ENDS = {int(end): end for end in PumpEnd}


class Queue(ctypes.Structure):
    """Pieces of memory in order and the progress over them. `Queue` of data_plane.c."""

    _fields_ = (
        ("vectors", ctypes.c_void_p),
        *c_fields(ctypes.c_int64, "count index offset moved"),
    )
    count: int
    index: int
    """First piece that is not done."""
    offset: int
    """Bytes of that piece that are done."""
    moved: int
    """Bytes moved since the queue was made."""
    array: IoVectors = NO_VECTORS
    """The array that `vectors` points to."""

    @property
    def empty(self) -> bool:
        return self.index == self.count

    def add(self, vectors: IoVectors) -> None:
        """Appends pieces. The caller keeps the array and its memory alive until they are done."""
        if self.index < self.count:
            vectors = np.concatenate((self.array[self.index :], vectors))
        else:
            self.offset = 0
        self.array = vectors
        self.vectors = address_of(vectors)
        self.count = len(vectors)
        self.index = 0

    def advance(self, count: int) -> None:
        """Marks `count` more bytes as done and skips empty pieces behind them, as `advance` of data_plane.c does."""
        self.moved += count
        count += self.offset
        while self.index < self.count and count >= (length := int(self.array[self.index, 1])):
            count -= length
            self.index += 1
        self.offset = 0 if self.empty else count

    def clear(self) -> None:
        """Drops the remaining pieces."""
        self.index = self.count = self.offset = 0
        self.array = NO_VECTORS


class Hashing(ctypes.Structure):
    """Values that are hashed as they arrive. `Hashing` of data_plane.c."""

    _fields_ = (
        *c_fields(ctypes.c_void_p, "lengths sums"),
        *c_fields(ctypes.c_int64, "count index"),
        ("hash", ctypes.c_uint64 * 17),
    )
    count: int
    index: int


class FlowState(ctypes.Structure):
    """Progress of both directions of one socket. `Flow` of data_plane.c."""

    _fields_ = (
        *c_fields(Queue, "out into"),
        *c_fields(ctypes.c_int64, "wanted active_at_ns"),
        *c_fields(ctypes.c_int32, "error descriptor rest"),
        ("hashing", Hashing),
        ("num_unsealed", ctypes.c_int64),
        ("seal", ctypes.c_uint64 * 17),
    )
    wanted: int
    """Value of `into.moved` at which the input is complete."""
    active_at_ns: int
    """CLOCK_MONOTONIC time of the last moved byte. `pump` spins only shortly after it."""
    error: int
    """The errno after `PumpEnd.ERROR`."""
    descriptor: int
    num_unsealed: int
    """Pieces of queued output with the length `UNSEALED`."""


class Flow:
    """Pending output and input of one stream socket. Used by one thread at a time."""

    __slots__ = ("_hashed", "into", "out", "state")

    def __init__(self) -> None:
        self.state = FlowState(descriptor=-1)
        self.out = Queue.from_buffer(self.state, FlowState.out.offset)
        self.into = Queue.from_buffer(self.state, FlowState.into.offset)

    @property
    def wants_input(self) -> bool:
        return self.into.moved < self.state.wanted and not self.into.empty

    def receive(self, vectors: IoVectors, at_least: int | None = None) -> None:
        """Appends places for input. `pump` ends with IN_DONE once `at_least` of their bytes have arrived.

        None means all bytes. With fewer, `into.moved` tells how many arrived.
        """
        wanted = max(self.state.wanted, self.into.moved)
        self.into.add(vectors)
        self.state.wanted = wanted + (total_bytes(vectors) if at_least is None else at_least)

    def drop_input(self) -> None:
        """Drops the places of input that has not arrived."""
        self.into.clear()
        self.state.wanted = self.into.moved
        self.state.hashing = Hashing()

    def hash_values(self, lengths: Words) -> Words:
        """Returns an array that receives the XXH3-64 of the next values of the input, of these lengths back to back.

        `pump` hashes them while they are in the cache. The checksum of a value of up to `SHORT_VALUE` bytes stays 0.
        """
        sums: Words = np.zeros(len(lengths), np.uint64)
        self._hashed = lengths, sums  # kept alive
        hashing = self.state.hashing
        hashing.lengths, hashing.sums = address_of(lengths), address_of(sums)
        hashing.count, hashing.index = len(lengths), 0
        return sums

    def take_descriptor(self) -> int | None:
        """Returns the file descriptor that came with the last received bytes and gives it to the caller to close.

        On a Unix socket one receive never passes the message that carries a descriptor.
        """
        taken, self.state.descriptor = self.state.descriptor, -1
        return None if taken < 0 else taken


def total_bytes(vectors: IoVectors) -> int:
    return int(vectors[0, 1]) if len(vectors) == 1 else int(vectors[:, 1].sum())


class DataPlane:
    """The functions of data_plane.c. Raises CompilerError if the library cannot be built or loaded."""

    def __init__(self, folder: Path | None) -> None:
        library = load_library(SOURCE, C_FLAGS, folder)
        brief = ctypes.PyDLL(None, handle=library._handle)
        pointer, int64, int32, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
        copying = [pointer, pointer, pointer, int64, int32]
        signatures: tuple[tuple[Any, list[Any], Any], ...] = (
            (library.copy_rows, copying, None),
            (library.copy_rows_verified, copying, int32),
            (library.rows_equal, copying, int32),
            (library.fill_iovecs, copying, int64),
            (library.join_rows, [pointer, int64, int64, int64, ctypes.POINTER(int64)], int64),
            (brief.window_enter, [pointer], int32),
            (brief.window_leave, [pointer], None),
            (brief.window_close, [pointer], None),
            (brief.window_close_if_idle, [pointer], int32),
            (brief.segment_hold, [pointer], int32),
            (brief.segment_release, [pointer], None),
            (brief.segment_close_if_unused, [pointer], int32),
            (brief.path_submitted, [pointer, int64, double], None),
            (brief.path_taken, [pointer, int64], None),
            (brief.path_arrived, [pointer, int32, int64, double], None),
            (brief.path_left, [pointer, int64, double], None),
            (library.pump, [int32, ctypes.POINTER(FlowState), int64, int64], int32),
            (library.exchange, [*[pointer] * 3, *[int64] * 5], int32),
            (library.exchange_more, [pointer, pointer, int64], int32),
            (library.serve, [pointer, pointer, int64], int32),
            (library.copy_inline, [*[pointer] * 5, int64, int64], int32),
            (brief.lease_begin, [pointer, int64, pointer, pointer, int64], int32),
            (brief.lease_end_if_idle, [pointer, int64], int32),
            (library.lease_end, [pointer, int64, int64], None),
        )
        for function, arguments, result in signatures:
            function.argtypes, function.restype = arguments, result
        self.library = library
        self.brief = brief
        """Functions that take nanoseconds, so they keep the GIL."""
        self._pump = library.pump  # looked up once because it is called for every frame

    def copy_rows(self, to: int, source: int, rows: Rows, *, to_column: int) -> None:
        """Copies each row's bytes between two base addresses.

        `to_column` is the column of `rows` with the destination's offsets: LOCAL if `to` is local memory (READ),
        otherwise REMOTE. The other column has the source's offsets.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        self.library.copy_rows(to, source, address_of(rows), len(rows), to_column)

    def copy_rows_verified(self, to: int, source: int, rows: Rows, *, to_column: int) -> bool:
        """Copies like `copy_rows`, then reads both sides again. Returns False if a copy differs from its source at that
        time."""
        rows = np.ascontiguousarray(rows, np.int64)
        place = address_of(rows)
        return bool(self.library.copy_rows_verified(to, source, place, len(rows), to_column))

    def rows_equal(self, at: int, source: int, rows: Rows, *, column: int) -> bool:
        """Returns True if each row's bytes at `at` (offsets in `column`) equal its bytes at `source`."""
        rows = np.ascontiguousarray(rows, np.int64)
        return bool(self.library.rows_equal(at, source, address_of(rows), len(rows), column))

    def join_rows(self, rows: Rows, local_bytes: int, remote_bytes: int) -> tuple[int, int]:
        """Joins adjacent rows and drops empty ones, in place. Returns the numbers of rows left and of their bytes.

        The number of rows is negative if one of them leaves the local or the remote segment of these sizes.
        """
        total = ctypes.c_int64()
        return self.library.join_rows(address_of(rows), len(rows), local_bytes, remote_bytes, total), total.value

    def joined(self, rows: Rows) -> Rows:
        """Returns valid rows with adjacent ones joined and empty ones dropped. Overwrites `rows`."""
        return rows[: self.join_rows(rows, LIMIT, LIMIT)[0]]

    def iovecs(self, base: int, rows: Rows, *, column: int, before: Piece = None, behind: Piece = None) -> IoVectors:
        """Returns the pieces of `rows` on one side in order, between the pieces `before` and `behind` them. Adjacent
        pieces of rows are joined and empty ones omitted."""
        rows = np.ascontiguousarray(rows, np.int64)
        first = 1 if before else 0
        made: IoVectors = np.empty((len(rows) + 2, 2), np.uint64)
        place = address_of(made) + first * made.itemsize * 2
        count = first + self.library.fill_iovecs(place, base, address_of(rows), len(rows), column)
        if before:
            made[0] = before
        if behind:
            made[count] = behind
            count += 1
        return made[:count]

    def pump(self, fd: int, flow: Flow, *, timeout_ns: int, spin_ns: int) -> PumpEnd:
        """Sends and receives until there is a reason to stop (`PumpEnd`), without waiting for one direction while the
        other can move.

        `timeout_ns` limits the whole call; 0 does what is possible immediately. When nothing moves, the call spins for
        up to `spin_ns` after the last byte and then sleeps in poll(2). After a fruitless spin the next few waits only
        sleep. A broken pipe raises no signal.
        """
        return _PUMP_ENDS[self._pump(fd, flow.state, timeout_ns, spin_ns)]


@functools.cache
def data_plane() -> DataPlane:
    """Returns the process's data plane, loaded once like a module; it is code without state.

    The first call on a machine may take as long as the compiler. Raises ConfigError that says what to install.
    """
    try:
        return DataPlane(shared_cache())
    except CompilerError as error:
        raise ConfigError(f"transfers need compiled code: {error}") from error


_Place = ctypes.c_char * 0


def address_of(buffer: "ReadableBuffer | np.ndarray[Any, Any]") -> int:
    """Returns the address of contiguous memory, valid while its owner keeps it in place."""
    # Called at least once per frame: this takes a quarter of a microsecond, numpy's own attribute 1.5 µs.
    memory: Any = buffer
    if isinstance(memory, bytes):
        return ctypes.c_void_p.from_buffer(ctypes.c_char_p(memory)).value or 0
    try:
        return ctypes.addressof(_Place.from_buffer(memory))
    except TypeError:  # read-only
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def vectors(*pieces: tuple[int, int]) -> IoVectors:
    """Builds IoVectors from (address, length) pairs."""
    return np.array(pieces, np.uint64).reshape(-1, 2)
