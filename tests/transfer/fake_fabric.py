"""Devices in this process's memory: posting a request is doing it.

Fulfils `transfer.rdma.fabric` (the same session, target and memory run on it as on pyverbs), so that
their rules can be tested where there is no RDMA device. `Wire.freeze` keeps requests from ending.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from dataclasses import dataclass, field

from protocol.errors import InvalidRequest, PeerLost
from transfer.rdma.device import Gid, Port
from transfer.rdma.fabric import CHAIN, Completion, Limits, PairAddress, Runs

LIMITS = Limits(max_message_bytes=1 << 20, max_send_requests=256, max_outstanding_reads=16, path_mtu=5)


@dataclass
class Wire:
    """What connects the devices of one test."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    regions: dict[int, FakeRegion] = field(default_factory=dict)
    pairs: dict[int, FakePair] = field(default_factory=dict)
    next_number: int = 0x100
    frozen: deque[tuple[FakePair, object]] | None = None
    """Requests that are kept back, in order; None: none is."""
    has_frozen: threading.Event = field(default_factory=threading.Event)
    devices: list[FakeDevice] = field(default_factory=list)
    num_to_damage: int = 0
    """This many of the next writes arrive with their first byte flipped."""

    def number(self) -> int:
        with self.lock:
            self.next_number += 1
            return self.next_number

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
        self.local_key = self.remote_key = wire.number()
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

    def put(self, completion: Completion) -> None:
        assert len(self.entries) < self.capacity, "the completion queue overflows"
        self.entries.append(completion)
        if self.is_armed and self.descriptor is not None:
            self.is_armed = False
            os.eventfd_write(self.descriptor, 1)

    def poll(self, limit: int) -> list[Completion]:
        found = []
        while self.entries and len(found) < limit:
            found.append(self.entries.popleft())
        return found

    def arm(self) -> None:
        self.is_armed = True

    def acknowledge(self) -> None:
        assert self.descriptor is not None
        os.eventfd_read(self.descriptor)

    def close(self) -> None:
        assert self.descriptor is not None
        os.close(self.descriptor)
        self.descriptor = None


@dataclass
class Request:
    token: int
    is_read: bool
    runs: Runs
    local_key: int
    remote_key: int
    immediate: int | None


class FakePair:
    def __init__(self, wire: Wire, completions: FakeCompletionQueue, depths: tuple[int, int], serves: bool) -> None:
        self.wire = wire
        self.completions = completions
        self.send_depth, self.receive_depth = depths
        self.serves = serves
        self.number = wire.number()
        self.first_packet = 1
        self.max_inline_bytes = 0
        self.peer: FakePair | None = None
        self.state = "init"
        self.receives: deque[int] = deque()
        wire.pairs[self.number] = self

    def connect(self, peer: PairAddress) -> None:
        found = self.wire.pairs.get(peer.number)
        if found is None:
            raise PeerLost("no such queue pair")
        self.peer, self.state = found, "connected"

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> None:
        self._post(Request(token, True, runs, local_key, remote_key, None))

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

    def run(self, request: object) -> None:
        assert isinstance(request, Request)
        if self.state == "closed":
            return
        failure = "wr flush" if self.state == "failed" else self._failure(request)
        if failure is None:
            failure = self._move(request)
        if failure is not None:
            self.state = "failed"
        self.completions.put(Completion(request.token, failure, None))

    def _failure(self, request: Request) -> str | None:
        if self.peer is None or self.peer.state != "connected":
            return "retry exc"
        region = self.wire.regions.get(request.remote_key)
        if region is None or not self.peer.serves:
            return "rem access"
        allowed = region.remote_read if request.is_read else region.remote_write
        inside = all(region.holds(remote, nbytes) for remote, _, nbytes in request.runs)
        return None if allowed and inside else "rem access"

    def _move(self, request: Request) -> str | None:
        own = self.wire.regions[request.local_key]
        for remote, local, nbytes in request.runs:
            assert own.holds(local, nbytes)
            to, start = (local, remote) if request.is_read else (remote, local)
            ctypes.memmove(to, start, nbytes)
            if nbytes and not request.is_read and self.wire.num_to_damage:
                self.wire.num_to_damage -= 1
                ctypes.c_ubyte.from_address(to).value ^= 0xFF
        if request.immediate is None:
            return None
        assert self.peer is not None
        if not self.peer.receives:
            return "rnr retry exc"
        token = self.peer.receives.popleft()
        self.peer.completions.put(Completion(token, None, request.immediate))
        return None

    def receive(self, token: int) -> None:
        assert len(self.receives) < self.receive_depth
        self.receives.append(token)

    def fail(self) -> None:
        with self.wire.lock:
            if self.state == "connected":
                self.state = "failed"
                while self.receives:
                    self.completions.put(Completion(self.receives.popleft(), "wr flush", None))
                for pair, request in self.wire.frozen or ():
                    if pair is self:
                        pair.run(request)

    def close(self) -> None:
        with self.wire.lock:
            self.state = "closed"
            self.wire.pairs.pop(self.number, None)


class FakeDevice:
    def __init__(self, wire: Wire, port: Port) -> None:
        self.wire = wire
        self.port = port
        self.lid = 0
        self.limits = LIMITS
        self.is_closed = False

    def register(self, address: int, nbytes: int, *, remote_read: bool, remote_write: bool) -> FakeRegion:
        if self.is_closed:
            raise InvalidRequest("the device is closed")
        return FakeRegion(self.wire, address, nbytes, remote_read, remote_write)

    def make_completion_queue(self, capacity: int) -> FakeCompletionQueue:
        return FakeCompletionQueue(capacity)

    def make_queue_pair(self, completions: object, *, send_depth: int, receive_depth: int, serves: bool) -> FakePair:
        assert isinstance(completions, FakeCompletionQueue)
        return FakePair(self.wire, completions, (send_depth, receive_depth), serves)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class FakeFabric:
    """One port whose address is this host's loopback."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def ports(self) -> list[Port]:
        gid = Gid(1, bytes(10) + b"\xff\xff\x7f\x00\x00\x01", "RoCE v2", "lo")
        return [
            Port(
                device="fake0",
                number=1,
                state="ACTIVE",
                is_ethernet=True,
                gid=gid,
                bandwidth_bytes_s=None,
                numa_node=None,
            )
        ]

    def open(self, port: Port) -> FakeDevice:
        self.wire.devices.append(FakeDevice(self.wire, port))
        return self.wire.devices[-1]
