"""Interface of an RDMA device as the transport needs it: memory regions, queue pairs, completions.

Implemented by `verbs` with pyverbs and by the tests with shared memory. Its rule: no call blocks, and after
`QueuePair.close` neither side's bytes move over that pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from transfer.rdma.device import Port


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a device port."""

    max_message_bytes: int
    max_send_requests: int
    max_outstanding_reads: int
    """READs that one queue pair may have in flight, as initiator and as target."""
    path_mtu: int
    """MTU as the verbs enumeration: 1 is 256 bytes, 5 is 4096."""


@dataclass(frozen=True, slots=True)
class PairAddress:
    """Facts about one end of a connected queue pair that the other end needs."""

    number: int
    first_packet: int
    """The 24-bit sequence number of its first packet."""
    gid: bytes
    lid: int
    path_mtu: int
    max_outstanding_reads: int


Runs = Sequence[Sequence[int]]
"""Runs as (remote address, local address, bytes), contiguous at both ends."""


class Completion(NamedTuple):
    """Completion of one work request."""

    token: int
    """Token that the request was posted with."""
    failure: str | None
    """Reason of failure; None on success. After a failure the queue pair is dead."""
    immediate: int | None
    """Number that came with the peer's write; set only for receives."""


class Region(Protocol):
    """Registered memory, pinned until closed."""

    local_key: int
    remote_key: int

    def close(self) -> None: ...


class CompletionQueue(Protocol):
    """Queue that reports the completions of several queue pairs."""

    descriptor: int | None
    """File descriptor that becomes readable on a completion after `arm`; None if the device cannot signal."""

    def poll(self, limit: int) -> list[Completion]: ...
    def arm(self) -> None:
        """Makes the next completion signal `descriptor`. Poll once more after it."""

    def acknowledge(self) -> None:
        """Consumes the signal, so that `descriptor` is no longer readable."""

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection with its own send and receive queue."""

    number: int
    first_packet: int
    max_inline_bytes: int
    """Size up to which writes are copied into the request itself."""

    def connect(self, peer: PairAddress) -> None: ...

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> None:
        """Posts one read request per run (at most `CHAIN`). The last one yields a completion."""

    def write(
        self,
        token: int,
        runs: Runs,
        local_key: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        """Posts write requests like `read`. With `immediate`, the last one completes a receive of the peer with that
        number."""

    def receive(self, token: int) -> None:
        """Posts a receive, for one write with `immediate`."""

    def fail(self) -> None:
        """Makes the peer's packets bounce from now on and requests in flight fail. May be called from any thread."""

    def close(self) -> None: ...


class Device(Protocol):
    """One opened port of a device."""

    port: Port
    lid: int
    """Address on InfiniBand."""
    limits: Limits

    def register(self, address: int, nbytes: int, *, remote_read: bool, remote_write: bool) -> Region:
        """Registers memory. Raises InvalidRequest."""

    def make_completion_queue(self, capacity: int) -> CompletionQueue: ...

    def make_queue_pair(
        self, completions: CompletionQueue, *, send_depth: int, receive_depth: int, serves: bool
    ) -> QueuePair:
        """Creates a queue pair. `serves` lets the peer read and write through it. Raises PeerLost if no more can be
        created."""

    def close(self) -> None: ...


class Fabric(Protocol):
    """All RDMA devices of this host."""

    def ports(self) -> list[Port]:
        """Returns the ports. Raises ConfigError if RDMA is unavailable."""

    def open(self, port: Port) -> Device:
        """Opens a port. Raises ConfigError."""


CHAIN = 64
"""Runs per post. One doorbell (on rxe one system call) covers all of them."""
