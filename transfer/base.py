"""What is moved, and the seam between the engine and its transports.

Owns the vocabulary (`Op`, `RemoteSegment`, `Transfer`, `Move`) and the three Protocols a transport
implements; a transport is one file plus one line in `registry`. Its rule, for all of them: **the
owner of the destination memory does the store**, so a peer that stopped and came back can never
write late. Knows no sockets and no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transfer.address import Address
    from transfer.segments import Segment, SegmentTable
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


Row = tuple[int, int, int]
"""(remote offset, local offset, length) of one contiguous run of bytes."""


@dataclass(slots=True, eq=False)
class Move:
    """The transfers of a batch that one frame can carry: same op, segments and window."""

    op: Op
    local: Segment
    segment_id: int
    window_id: int | None
    rows: list[Row] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Positions of its transfers in the batch."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """One attempt to reach a peer."""

    address: Address
    credentials: Credentials
    deadline_at: float
    while_waiting: Callable[[], None]
    """Called now and then while the peer is silent; may raise to give up."""


class Session(Protocol):
    """An authenticated way to one peer. One thread uses it; only `abort` may come from others.

    `read` and `write` return once every byte is where it belongs. They raise `InvalidRequest` or
    `StaleLease` when the peer refused (the session lives on) and anything else when it is broken;
    after that no byte of the failed move can reach local memory.
    """

    transport: str

    def alive(self) -> bool: ...
    def begin(self, deadline_at: float) -> None: ...
    def read(self, move: Move) -> None: ...
    def write(self, move: Move, *, corrupt: bool) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    """Serves peers until closed. `endpoint` is what they dial, as published in the address."""

    endpoint: str

    def close(self) -> None: ...


class Transport(Protocol):
    """One kind of path between two engines."""

    name: str

    def listen(self, host: str, hosted: Hosted) -> Listener: ...
    def reachable(self, address: Address) -> bool: ...
    def connect(self, dial: Dial) -> Session: ...
