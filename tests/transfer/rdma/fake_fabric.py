"""In-memory RDMA devices: a request is executed when it is posted.

Implements `transfer.rdma.device`, so that the session, target and memory code that runs on pyverbs can be tested where
there is no RDMA device. After `Wire.freeze`, requests are held back instead of executed.
"""

import ctypes
import itertools
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moonserve.protocol.errors import InvalidRequest, PeerLost
from moonserve.transfer.rdma.device import CHAIN, Completion, Gid, Limits, PairAddress, Port, Runs

LIMITS = Limits(max_message_bytes=1 << 20, max_send_requests=256, max_outstanding_reads=16, path_mtu=5)
LOOPBACK = Gid(1, bytes(10) + b"\xff\xff\x7f\x00\x00\x01", "RoCE v2", "lo")
PORT = Port(
    device="fake0", number=1, state="ACTIVE", is_ethernet=True, gid=LOOPBACK, bandwidth_bytes_s=None, numa_node=None
)


@dataclass
class Wire:
    """Fabric of one test, which connects its devices. It has one port, whose address is this host's loopback."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    regions: "dict[int, FakeRegion]" = field(default_factory=dict)
    pairs: "dict[int, FakePair]" = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(0x101))
    frozen: "deque[tuple[FakePair, Request]] | None" = None
    """Requests that are held back, in order. None: requests are executed at once."""
    has_frozen: threading.Event = field(default_factory=threading.Event)
    devices: "list[FakeDevice]" = field(default_factory=list)
    num_to_damage: int = 0
    """Number of next writes whose first byte is flipped on arrival."""

    def ports(self) -> list[Port]:
        return [PORT]

    def open(self, port: Port) -> "FakeDevice":
        self.devices.append(FakeDevice(self, port))
        return self.devices[-1]

    def freeze(self) -> None:
        self.frozen = deque()

    def thaw(self) -> None:
        with self.lock:
            frozen, self.frozen = self.frozen or deque(), None
            for pair, request in frozen:
                pair.run(request)


class FakeRegion:
    def __init__(self, wire: Wire, address: int, nbytes: int, read: bool, write: bool) -> None:
        self.wire = wire
        self.address, self.nbytes = address, nbytes
        self.remote_read, self.remote_write = read, write
        self.local_key = self.remote_key = next(wire.numbers)
        wire.regions[self.local_key] = self

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        del self.wire.regions[self.local_key]


class FakeCompletionQueue:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.descriptor: int | None = os.eventfd(0, os.EFD_NONBLOCK)
        self.entries: deque[Completion] = deque()
        self.is_armed = False

    def put(self, token: int, failure: str | None, immediate: int | None = None) -> None:
        assert len(self.entries) < self.capacity, "the completion queue overflows"
        self.entries.append(Completion(token, failure, immediate))
        if self.is_armed and self.descriptor is not None:
            self.is_armed = False
            os.eventfd_write(self.descriptor, 1)

    def poll(self, limit: int) -> list[Completion]:
        return [self.entries.popleft() for _ in range(min(limit, len(self.entries)))]

    def arm(self) -> None:
        self.is_armed = True

    def acknowledge(self) -> None:
        assert self.descriptor is not None
        os.eventfd_read(self.descriptor)

    def close(self) -> None:
        assert self.descriptor is not None
        os.close(self.descriptor)
        self.descriptor = None


class Request(NamedTuple):
    token: int
    is_read: bool
    runs: Runs
    local_key: int
    remote_key: int
    immediate: int | None = None


class FakePair:
    first_packet = 1
    max_inline_bytes = 0

    def __init__(self, wire: Wire, completions: FakeCompletionQueue, receive_depth: int, serves: bool) -> None:
        self.wire = wire
        self.completions = completions
        self.receive_depth = receive_depth
        self.serves = serves
        self.number = next(wire.numbers)
        self.peer: FakePair | None = None
        self.state = "init"
        self.receives: deque[int] = deque()
        wire.pairs[self.number] = self

    def connect(self, peer: PairAddress) -> None:
        self.peer = self.wire.pairs.get(peer.number)
        if self.peer is None:
            raise PeerLost("no such queue pair")
        self.state = "connected"

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> None:
        self._post(Request(token, True, runs, local_key, remote_key))

    def write(self, token: int, runs: Runs, local_key: int, remote_key: int, immediate: int | None) -> None:
        self._post(Request(token, False, runs, local_key, remote_key, immediate))

    def _post(self, request: Request) -> None:
        assert 0 < len(request.runs) <= CHAIN
        with self.wire.lock:
            if self.wire.frozen is not None:
                self.wire.frozen.append((self, request))
                self.wire.has_frozen.set()
            else:
                self.run(request)

    def run(self, request: Request) -> None:
        if self.state == "closed":
            return
        failure = "wr flush" if self.state == "failed" else self._move(request)
        if failure is not None:
            self.state = "failed"
        self.completions.put(request.token, failure)

    def _move(self, request: Request) -> str | None:
        """Executes the request. Returns the failure, or None."""
        if self.peer is None or self.peer.state != "connected":
            return "retry exc"
        region, own = self.wire.regions.get(request.remote_key), self.wire.regions[request.local_key]
        if region is None or not (region.remote_read if request.is_read else region.remote_write):
            return "rem access"
        if not self.peer.serves or not all(region.holds(remote, nbytes) for remote, _, nbytes in request.runs):
            return "rem access"
        for remote, local, nbytes in request.runs:
            assert own.holds(local, nbytes)
            to, start = (local, remote) if request.is_read else (remote, local)
            ctypes.memmove(to, start, nbytes)
            if nbytes and not request.is_read and self.wire.num_to_damage:
                self.wire.num_to_damage -= 1
                ctypes.c_ubyte.from_address(to).value ^= 0xFF
        if request.immediate is not None:
            if not self.peer.receives:
                return "rnr retry exc"
            self.peer.completions.put(self.peer.receives.popleft(), None, request.immediate)
        return None

    def receive(self, token: int) -> None:
        assert len(self.receives) < self.receive_depth
        self.receives.append(token)

    def fail(self) -> None:
        with self.wire.lock:
            if self.state == "connected":
                self.state = "failed"
                while self.receives:
                    self.completions.put(self.receives.popleft(), "wr flush")
                for pair, request in self.wire.frozen or ():
                    if pair is self:
                        pair.run(request)

    def close(self) -> None:
        with self.wire.lock:
            self.state = "closed"
            self.wire.pairs.pop(self.number, None)


class FakeDevice:
    lid = 0
    limits = LIMITS

    def __init__(self, wire: Wire, port: Port) -> None:
        self.wire = wire
        self.port = port
        self.is_closed = False

    def register(self, address: int, nbytes: int, *, remote_read: bool, remote_write: bool) -> FakeRegion:
        if self.is_closed:
            raise InvalidRequest("the device is closed")
        return FakeRegion(self.wire, address, nbytes, remote_read, remote_write)

    def make_completion_queue(self, capacity: int) -> FakeCompletionQueue:
        return FakeCompletionQueue(capacity)

    def make_queue_pair(self, completions: Any, *, send_depth: int, receive_depth: int, serves: bool) -> FakePair:
        return FakePair(self.wire, completions, receive_depth, serves)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
