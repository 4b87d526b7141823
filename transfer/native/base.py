"""What the data plane does, and the state that its calls share with C.

Owns `Flow`, whose layout `data_plane.c` repeats, and the Protocol that the compiled library and its
fallback in Python both satisfy. Addresses are taken as they are, so bounds are the caller's to check
and memory is the caller's to keep alive. Knows no frames, no segments and no errors of the cluster.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from transfer.scatter import Rows

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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
        """Marks `count` more bytes as done, and the empty pieces behind them."""
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


class DataPlane(Protocol):
    """The same functions in C and in Python (`library`)."""

    name: str
    """"native" or "python"."""

    def copy_rows(self, to: int, source: int, rows: Rows, *, to_column: int) -> None:
        """Copies each row's bytes between two base addresses, without the GIL.

        `to_column` is the column of `rows` with the destination's offsets: LOCAL when `to` is local
        memory (READ), REMOTE otherwise; the other column has the source's.
        """

    def copy_rows_verified(self, to: int, source: int, rows: Rows, *, to_column: int) -> bool:
        """As `copy_rows`, reading both sides again; False when a copy is not what its source is then."""

    def rows_equal(self, at: int, source: int, rows: Rows, *, column: int) -> bool:
        """Whether each row's bytes at `at` (offsets in `column`) and at `source` are the same."""

    def iovecs(self, base: int, rows: Rows, *, column: int) -> IoVectors:
        """The places of `rows` on one side, in order, touching ones joined, empty ones left out."""

    def pump(self, fd: int, flow: Flow, *, timeout_ns: int, spin_ns: int) -> End:
        """Sends and receives, whichever can move, until there is a reason to stop (`End`).

        Never waits for one direction while the other could move. `timeout_ns` is for the whole call, 0
        does what is possible at once. When nothing moves it spins for up to `spin_ns` after the last byte
        and then sleeps in poll(2); after a spin for nothing it only sleeps for some waits. No signal is
        raised for a broken pipe.
        """


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
