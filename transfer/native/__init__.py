"""The data plane: bulk copies and stream I/O in one call each, with the GIL released.

`data_plane()` is `data_plane.c`, from the wheel or compiled once per machine. A `Flow`, whose layout the C file
repeats, keeps how far both directions of a socket are: after IN_DONE or TIMEOUT add more, or nothing, and pump again.
Addresses are taken as they are, so bounds are the caller's to check and memory is the caller's to keep alive. Knows no
frames and no segments.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError
from protocol.native import C_FLAGS, CompilerError, load_library, shared_cache
from transfer.scatter import Rows

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SOURCE = Path(__file__).with_name("data_plane.c")

IoVectors = npt.NDArray[np.uint64]
"""Shape (n, 2), C-contiguous, writable: address and length of each piece; a `struct iovec` array."""

MAX_IOVECS = 1024
"""IOV_MAX of Linux: pieces per system call."""

NO_VECTORS: IoVectors = np.empty((0, 2), np.uint64)


class End(IntEnum):
    """Why `pump` came back."""

    IN_DONE = 1
    """What `Flow.receive` asked for has arrived; output may be unfinished."""
    OUT_DONE = 2
    """All is sent and no input was asked for."""
    TIMEOUT = 3
    """The time is over; what has moved so far counts and the next call goes on from there."""
    HANGUP = 4
    """The peer has ended its side; nothing more will come."""
    ERROR = 5
    """See `Flow.error` (errno)."""


_ENDS = {int(end): end for end in End}


class Queue(ctypes.Structure):
    """Pieces of memory in order, and how far they are done. `Queue` of data_plane.c."""

    _fields_ = (
        ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("index", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("moved", ctypes.c_int64),
    )
    count: int
    index: int
    """The first piece that is not done …"""
    offset: int
    """… and how many of its bytes are."""
    moved: int
    """Bytes since the queue was made."""
    array: IoVectors = NO_VECTORS
    """What `vectors` points to."""

    @property
    def empty(self) -> bool:
        return self.index == self.count

    def add(self, vectors: IoVectors) -> None:
        """Behind what is left. The array and its memory are the caller's to keep until they are done."""
        if self.index < self.count:
            vectors = np.concatenate((self.array[self.index :], vectors))
        else:
            self.offset = 0
        self.array = vectors
        self.vectors = address_of(vectors)
        self.count = len(vectors)
        self.index = 0

    def advance(self, count: int) -> None:
        """Marks `count` more bytes as done, and the empty pieces behind them, as `advance` of data_plane.c."""
        self.moved += count
        count += self.offset
        while self.index < self.count and count >= (length := int(self.array[self.index, 1])):
            count -= length
            self.index += 1
        self.offset = 0 if self.empty else count

    def clear(self) -> None:
        """Drops what is left."""
        self.index = self.count = self.offset = 0
        self.array = NO_VECTORS


class FlowState(ctypes.Structure):
    """`Flow` of data_plane.c."""

    _fields_ = (
        ("out", Queue),
        ("into", Queue),
        ("wanted", ctypes.c_int64),
        ("active_at_ns", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("descriptor", ctypes.c_int32),
        ("rest", ctypes.c_int32),
    )
    wanted: int
    """`into.moved` from which on the input is done."""
    active_at_ns: int
    """CLOCK_MONOTONIC when a byte moved last: `pump` only spins shortly after that."""
    error: int
    descriptor: int


class Flow:
    """What one stream socket is still to send and to receive. One thread at a time uses it."""

    __slots__ = ("into", "out", "state")

    def __init__(self) -> None:
        self.state = FlowState(descriptor=-1)
        self.out = Queue.from_buffer(self.state, FlowState.out.offset)
        self.into = Queue.from_buffer(self.state, FlowState.into.offset)

    @property
    def error(self) -> int:
        """errno after `End.ERROR`."""
        return self.state.error

    @property
    def wants_input(self) -> bool:
        return self.into.moved < self.state.wanted and not self.into.empty

    def send(self, vectors: IoVectors) -> None:
        """Adds to what is to be sent."""
        self.out.add(vectors)

    def receive(self, vectors: IoVectors, at_least: int | None = None) -> None:
        """Adds places for input. `pump` ends with IN_DONE once `at_least` bytes of these have come.

        None means all of them; with less, `into.moved` tells how many there were.
        """
        wanted = max(self.state.wanted, self.into.moved)
        self.into.add(vectors)
        self.state.wanted = wanted + (total_bytes(vectors) if at_least is None else at_least)

    def take_descriptor(self) -> int | None:
        """The file descriptor that came with the last bytes received, now the caller's to close.

        On a Unix socket one receive never goes beyond the message that a descriptor came with.
        """
        taken, self.state.descriptor = self.state.descriptor, -1
        return None if taken < 0 else taken


def total_bytes(vectors: IoVectors) -> int:
    return int(vectors[0, 1]) if len(vectors) == 1 else int(vectors[:, 1].sum())


class DataPlane:
    """The functions of data_plane.c. Raises CompilerError where they cannot be had."""

    def __init__(self, folder: Path | None) -> None:
        library = load_library(SOURCE, C_FLAGS, folder)
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        copying = [pointer, pointer, pointer, int64, int32]
        signatures: tuple[tuple[Any, list[Any], Any], ...] = (
            (library.copy_rows, copying, None),
            (library.copy_rows_verified, copying, int32),
            (library.rows_equal, copying, int32),
            (library.fill_iovecs, copying, int64),
            (library.pump, [int32, ctypes.POINTER(FlowState), int64, int64], int32),
        )
        for function, arguments, result in signatures:
            function.argtypes, function.restype = arguments, result
        self._library = library
        self._pump = library.pump  # looked up once, as it is called for every frame

    def copy_rows(self, to: int, source: int, rows: Rows, *, to_column: int) -> None:
        """Copies each row's bytes between two base addresses.

        `to_column` is the column of `rows` with the destination's offsets: LOCAL when `to` is local
        memory (READ), REMOTE otherwise; the other column has the source's.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        self._library.copy_rows(to, source, address_of(rows), len(rows), to_column)

    def copy_rows_verified(self, to: int, source: int, rows: Rows, *, to_column: int) -> bool:
        """As `copy_rows`, reading both sides again; False when a copy is not what its source is then."""
        rows = np.ascontiguousarray(rows, np.int64)
        place = address_of(rows)
        return bool(self._library.copy_rows_verified(to, source, place, len(rows), to_column))

    def rows_equal(self, at: int, source: int, rows: Rows, *, column: int) -> bool:
        """Whether each row's bytes at `at` (offsets in `column`) and at `source` are the same."""
        rows = np.ascontiguousarray(rows, np.int64)
        return bool(self._library.rows_equal(at, source, address_of(rows), len(rows), column))

    def iovecs(self, base: int, rows: Rows, *, column: int) -> IoVectors:
        """The places of `rows` on one side, in order, touching ones joined, empty ones left out."""
        rows = np.ascontiguousarray(rows, np.int64)
        made: IoVectors = np.empty((len(rows), 2), np.uint64)
        place = address_of(made)
        return made[: self._library.fill_iovecs(place, base, address_of(rows), len(rows), column)]

    def pump(self, fd: int, flow: Flow, *, timeout_ns: int, spin_ns: int) -> End:
        """Sends and receives, whichever can move, until there is a reason to stop (`End`).

        Never waits for one direction while the other could move. `timeout_ns` is for the whole call, 0
        does what is possible at once. When nothing moves it spins for up to `spin_ns` after the last byte
        and then sleeps in poll(2); after a spin for nothing it only sleeps for some waits. No signal is
        raised for a broken pipe.
        """
        return _ENDS[self._pump(fd, flow.state, timeout_ns, spin_ns)]


@functools.cache
def data_plane() -> DataPlane:
    """The one of this process: code, like an imported module, so it is loaded once and has no state.

    The first call on a machine may take as long as the compiler does. Raises ConfigError with what to install.
    """
    try:
        return DataPlane(shared_cache())
    except CompilerError as error:
        raise ConfigError(f"KV cannot be moved without compiled code: {error}") from error


_Place = ctypes.c_char * 0


def address_of(buffer: ReadableBuffer | np.ndarray[Any, Any]) -> int:
    """Where contiguous memory lies; valid for as long as its owner keeps it there."""
    # Once or more per frame: a quarter of a microsecond, where numpy's own answer takes one and a half.
    memory: Any = buffer
    if isinstance(memory, bytes):
        return ctypes.c_void_p.from_buffer(ctypes.c_char_p(memory)).value or 0
    try:
        return ctypes.addressof(_Place.from_buffer(memory))
    except TypeError:  # read-only
        array = np.frombuffer(memory, np.uint8)
        return int(array.__array_interface__["data"][0])


def vectors(*pieces: tuple[int, int]) -> IoVectors:
    """Of (address, length) pairs."""
    return np.array(pieces, np.uint64).reshape(-1, 2)
