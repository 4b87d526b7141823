"""Vocabulary of the package and the interface between the engine and its transports.

Owns `Op`, `RemoteSegment`, `Transfer`, `Slice`, and `Transport` with its parts. A new transport is one package plus one
line in `registry`; its sessions and targets extend the classes of `tcp`. The rule for all transports: **the owner of
the destination memory decides on every store**, so a peer that stopped and resumed can never write late. Knows no
sockets and no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from protocol.errors import MoonserveError
    from transfer.address import Address, Rail
    from transfer.config import TransferOptions
    from transfer.scatter import Rows
    from transfer.segments import Segment, SegmentInfo, SegmentTable
    from transfer.tcp.acceptor import Acceptor, ServedConnections
    from transfer.tcp.session import StreamSession
    from transfer.windows import WindowTable


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


class Feed(Protocol):
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

    def look_up(self) -> None:
        """Must be called every 50 ms of silence. Raises PeerLost if the session is to be given up."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Proof of membership in the cluster, and the incarnation of the process."""

    cluster_token: bytes
    instance: bytes


@dataclass(frozen=True, slots=True)
class Hosted:
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
    """Called every 50 ms while the peer is silent. May raise to give up."""


class Transport(Protocol):
    """One kind of path between two engines."""

    name: str

    def listen(self, hosted: Hosted) -> Sequence[Acceptor]:
        """Starts one listener per local rail and returns at least one. Raises ConfigError if that is impossible."""

    def reachable(self, address: Address) -> bool:
        """Returns False if the address shows that dialling is pointless."""

    def connect(self, dial: Dial) -> StreamSession:
        """Connects to a peer. Raises PeerLost, Unauthenticated or Incompatible."""

    def segment_added(self, segment: Segment) -> None:
        """Registers the segment with hardware, if the transport has any. Raises InvalidRequest or ConfigError."""

    def segment_removed(self, segment: Segment) -> None:
        """Releases the segment, which no batch and no window uses any more."""
