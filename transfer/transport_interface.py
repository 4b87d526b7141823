"""Vocabulary of the package and the interface between the engine and its transports.

Owns `Op`, `RemoteSegment`, `Transfer`, `Slice`, and `Transport` with its parts. A new transport is one package plus one
line in `engine`; its sessions and targets extend the classes of `tcp`. The rule for all transports: **the owner of
the destination memory decides on every store**, so a peer that stopped and resumed can never write late. Knows no
sockets and no threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from moonserve.protocol.errors import MoonserveError
from moonserve.transfer.config import TransferOptions
from moonserve.transfer.memory.scatter import Rows
from moonserve.transfer.memory.segments import Segment, SegmentInfo, SegmentTable
from moonserve.transfer.memory.write_windows import WindowTable
from moonserve.transfer.paths.peer_address import Address, Rail
from moonserve.transfer.tcp.served_connections import ServedConnections

STEP_S = 0.05
"""Interval of `SliceSource.tick` while a peer is silent."""


class Op(StrEnum):
    """Direction of a transfer, seen from the initiator: READ fills local memory, WRITE fills a peer's."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """A segment of the engine that published `address`."""

    address: str
    segment_id: int
    info: SegmentInfo | None = field(default=None, compare=False)
    """Set if the segment came from `TransferEngine.open`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One contiguous run of bytes between a local and a remote segment. A WRITE names an open window."""

    op: Op
    local: Segment
    local_offset: int
    remote: RemoteSegment
    remote_offset: int
    length: int
    window_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScatterTransfer:
    """Many runs between one local and one remote segment, as thousands of small blocks need.

    `rows` is int64 of shape (n, 3): remote offset, local offset, length, in bytes. It counts as one transfer with one
    outcome.
    """

    op: Op
    local: Segment
    remote: RemoteSegment
    rows: Rows
    window_id: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Slice:
    """Content of one frame: runs of one or more transfers with the same op, segments and window.

    The unit of scheduling, checksums and retries.
    """

    op: Op
    local: Segment
    segment_id: int
    window_id: int | None
    rows: Rows
    nbytes: int
    deadline_at: float
    """Deadline in monotonic seconds."""


class SliceSource(Protocol):
    """Supplies a session with slices and receives their outcomes. Used only by the thread that called `carry`."""

    def take(self) -> Slice | None:
        """Returns the next slice, or None if there is none right now."""

    def settle(self, part: Slice, error: MoonserveError | None) -> None:
        """Reports that a slice has ended and none of its bytes moves any more.

        `error` is the peer's refusal (InvalidRequest, StaleLease), or IntegrityError if the bytes arrived with a wrong
        checksum. Slices that a broken session leaves unsettled are retried elsewhere by the engine.
        """

    def deadline_at(self) -> float:
        """Returns the earliest deadline of slices taken and not settled; inf if there are none."""

    def may_give_up(self) -> bool:
        """Returns True if everything in flight can be tried on another path. The session then gives up after a few
        seconds of complete silence."""

    def tick(self) -> None:
        """Must be called every `STEP_S` of silence. Raises PeerLost if the session is to be given up."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Proof of membership in the cluster, and the incarnation of the process."""

    cluster_token: bytes
    instance: bytes


@dataclass(frozen=True, slots=True)
class ServedState:
    """State that an engine exposes to its peers."""

    credentials: Credentials
    segments: SegmentTable
    windows: WindowTable
    served: ServedConnections
    options: TransferOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Parameters of one connection attempt from a local rail to a peer's rail."""

    address: Address
    local: Rail
    remote: Rail
    credentials: Credentials
    options: TransferOptions
    deadline_at: float
    while_waiting: Callable[[], None]
    """Called every `STEP_S` while the peer is silent. May raise to give up."""


class Session(Protocol):
    """An authenticated connection to one peer over one pair of rails.

    Used by one thread at a time; other threads may only call `abort`.
    """

    connection_id: int
    """Identifies this session at the target, for `fence`."""

    def alive(self) -> bool:
        """Returns False if the peer is known to be gone. Does not wait."""

    def round_trip_s(self) -> float | None:
        """Returns the shortest round trip measured on a tcp session; None if none was."""

    def abort(self) -> None:
        """Makes the current or next wait of the session fail."""

    def close(self) -> None: ...

    def carry_inline(self, single: Slice) -> None:
        """Carries one slice while nothing else is in flight.

        Raises the errors that `carry` raises or settles slices with.
        """

    def copy_inline(self, window: int, segment: int, local: Segment, rows: bytes | int, count: int, path: int) -> int:
        """Copies a few rows, given packed or by address, out of mapped memory, or into the window unless it is 0, and
        counts them in `PathStats.native`.

        Returns 1 if that succeeded, -1 if a copy differs from its source, and 0 if `carry_inline` is needed.
        """

    def view(self, segment_id: int, offset: int, length: int, deadline_at: float) -> memoryview:
        """Returns a read-only view of the peer's memory in place, mapped for as long as the view is held.

        Raises InvalidRequest if the memory cannot be mapped, and PeerLost.
        """

    def carry(self, slices: SliceSource) -> None:
        """Carries slices, several at once, until `slices` has none and all taken ones are settled.

        Raises PeerLost (or another error that is not the peer's refusal) if the session breaks or a slice's deadline
        passes. The caller then closes the session; after `close` no byte of an unsettled slice can reach local memory.
        """

    def list_segments(self, deadline_at: float) -> list[SegmentInfo]:
        """Returns the peer's readable segments. Raises PeerLost."""

    def fence(self, connection_id: int, deadline_at: float) -> None:
        """Makes the peer end an earlier connection. On return nothing of it is served any more. Raises PeerLost."""


class Listener(Protocol):
    """Serves peers on one published rail."""

    rail: Rail

    def close(self) -> None:
        """Stops accepting and serving. On return none of its threads runs and nothing more is stored."""


class Transport(Protocol):
    """One kind of path between two engines."""

    name: str

    def listen(self, state: ServedState) -> Sequence[Listener]:
        """Starts one listener per local rail and returns at least one. Raises ConfigError if that is impossible."""

    def reachable(self, address: Address) -> bool:
        """Returns False if the address shows that dialling is pointless."""

    def connect(self, dial: Dial) -> Session:
        """Connects to a peer. Raises PeerLost, Unauthenticated or Incompatible."""

    def segment_added(self, segment: Segment) -> None:
        """Registers the segment with hardware, if the transport has any. Raises InvalidRequest or ConfigError."""

    def segment_removed(self, segment: Segment) -> None:
        """Releases the segment, which no batch and no window uses any more."""


def without_traceback(error: MoonserveError) -> MoonserveError:
    """Strips tracebacks from an error, which outlives its batch: their frames would keep the memory alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
