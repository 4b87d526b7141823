"""What the transport needs of an RDMA device: memory regions, queue pairs, completions.

`verbs` implements it with pyverbs, the tests with shared memory. Its rule: no call blocks, and from
`QueuePair.close` on neither side's bytes move over that pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from transfer.rdma.device import Port


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device port allows."""

    max_message_bytes: int
    max_send_requests: int
    max_outstanding_reads: int
    """READs that one queue pair may have on the wire, as initiator and as target."""
    path_mtu: int
    """The verbs' enumeration: 1 is 256 bytes, 5 is 4096."""


@dataclass(frozen=True, slots=True)
class PairAddress:
    """What one end of a connected queue pair must know of the other."""

    number: int
    first_packet: int
    """The 24-bit sequence number that its packets start with."""
    gid: bytes
    lid: int
    path_mtu: int
    max_outstanding_reads: int


Runs = Sequence[Sequence[int]]
"""Each (remote address, local address, bytes): contiguous at both ends."""


class Completion(NamedTuple):
    """One work request has ended."""

    token: int
    """What it was posted with."""
    failure: str | None
    """None when it succeeded. After a failure the queue pair is dead."""
    immediate: int | None
    """The number that came with the peer's write; only of receives."""


class Region(Protocol):
    """Registered memory, pinned until closed."""

    local_key: int
    remote_key: int

    def close(self) -> None: ...


class CompletionQueue(Protocol):
    """Where the work requests of several queue pairs end."""

    descriptor: int | None
    """Readable when a completion has come after `arm`; None when the device cannot tell."""

    def poll(self, limit: int) -> list[Completion]: ...
    def arm(self) -> None:
        """The next completion makes `descriptor` readable. Poll once more after it."""

    def acknowledge(self) -> None:
        """`descriptor` is readable no longer."""

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection with its own send and receive queue."""

    number: int
    first_packet: int
    max_inline_bytes: int
    """Writes up to this size are copied into the request itself."""

    def connect(self, peer: PairAddress) -> None: ...

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> None:
        """Posts one request per run (at most `CHAIN` of them); the last one's end is a completion."""

    def write(
        self,
        token: int,
        runs: Runs,
        local_key: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        """The same; with `immediate` the last one ends a receive of the peer's with that number."""

    def receive(self, token: int) -> None:
        """Makes room for one `immediate`."""

    def fail(self) -> None:
        """Packets of the peer bounce from now on, and requests under way end in failure. Any thread."""

    def close(self) -> None: ...


class Device(Protocol):
    """One opened port of a device."""

    port: Port
    lid: int
    """Its address on InfiniBand."""
    limits: Limits

    def register(self, address: int, nbytes: int, *, remote_read: bool, remote_write: bool) -> Region:
        """Raises InvalidRequest."""

    def make_completion_queue(self, capacity: int) -> CompletionQueue: ...

    def make_queue_pair(
        self, completions: CompletionQueue, *, send_depth: int, receive_depth: int, serves: bool
    ) -> QueuePair:
        """`serves`: the peer may read and write through it. Raises PeerLost when there are no more."""

    def close(self) -> None: ...


class Fabric(Protocol):
    """All devices of this host."""

    def ports(self) -> list[Port]:
        """Raises ConfigError when there cannot be any."""

    def open(self, port: Port) -> Device:
        """Raises ConfigError."""


CHAIN = 64
"""Runs per post: one doorbell (on rxe one system call) for all of them."""
