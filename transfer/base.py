"""What is moved, and the seam between the engine and its transports.

Owns the vocabulary (`Op`, `RemoteSegment`, `Transfer`, `Slice`) and what a transport implements
(`Transport`; its sessions and targets extend those of `tcp`): one package plus one line in
`registry`. Its rule, for all of them: **the owner of the destination memory decides on every store**,
so a peer that stopped and came back can never write late. Knows no sockets and no threads.
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
    """Seen from the initiator: READ fills local memory, WRITE fills a peer's."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """A segment of the engine that published `address`."""

    address: str
    segment_id: int
    info: SegmentInfo | None = field(default=None, compare=False)
    """Known when it came from `TransferEngine.open`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`length` bytes between one local and one remote place. A WRITE names an open window."""

    op: Op
    local: Segment
    local_offset: int
    remote: RemoteSegment
    remote_offset: int
    length: int
    window_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScatterTransfer:
    """Many runs between one local and one remote segment: what thousands of small blocks are.

    `rows` is int64 of shape (n, 3): remote offset, local offset, length, in bytes. It counts as one
    transfer: one outcome for all of it.
    """

    op: Op
    local: Segment
    remote: RemoteSegment
    rows: Rows
    window_id: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Slice:
    """What one frame carries: some runs of one or more transfers with the same op, segments and window.

    The unit of scheduling, of checksums and of retries.
    """

    op: Op
    local: Segment
    segment_id: int
    window_id: int | None
    rows: Rows
    nbytes: int
    deadline_at: float
    """Monotonic seconds."""


class Feed(Protocol):
    """What a session is to carry, and where it reports. Used by the thread that called `carry` only."""

    def take(self) -> Slice | None:
        """The next slice; None when there is nothing more right now."""

    def settle(self, part: Slice, error: MoonserveError | None) -> None:
        """The slice has ended: no byte of it moves any more.

        `error` is what the peer refused with (InvalidRequest, StaleLease), or IntegrityError: its
        bytes arrived with another checksum. What a broken session leaves unsettled the engine retries
        elsewhere.
        """

    def deadline_at(self) -> float:
        """The earliest deadline of the slices that were taken and not settled; inf when there are none."""

    def may_give_up(self) -> bool:
        """Whether all that is under way could be tried another way, so that a few seconds of complete
        silence are enough."""

    def look_up(self) -> None:
        """Call every 50 ms of silence; raises PeerLost when the session is to be given up."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What an engine proves itself with, and which incarnation of its process it is."""

    cluster_token: bytes
    instance: bytes


@dataclass(frozen=True, slots=True)
class Hosted:
    """What an engine offers to its peers."""

    credentials: Credentials
    segments: SegmentTable
    windows: WindowTable
    served: ServedConnections
    options: TransferOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """One attempt to reach a peer from one local rail to one of the peer's."""

    address: Address
    local: Rail
    remote: Rail
    credentials: Credentials
    options: TransferOptions
    deadline_at: float
    while_waiting: Callable[[], None]
    """Called every 50 ms while the peer is silent; may raise to give up."""


class Transport(Protocol):
    """One kind of path between two engines."""

    name: str

    def listen(self, hosted: Hosted) -> Sequence[Acceptor]:
        """One listener per local rail, at least one. Raises ConfigError when that is impossible."""

    def reachable(self, address: Address) -> bool:
        """Whether it is worth dialling, as far as the address tells."""

    def connect(self, dial: Dial) -> StreamSession:
        """Raises PeerLost, Unauthenticated or Incompatible."""

    def segment_added(self, segment: Segment) -> None:
        """Registers it with the hardware, where there is any. Raises InvalidRequest."""

    def segment_removed(self, segment: Segment) -> None:
        """No batch and no window uses it any more."""
