"""The queue pairs of one connection, their send queues, and the joint wait for completions and the peer's frames.

No more requests are posted than the queue holds. A chain's completion frees all of its requests, since a reliable
connection completes requests in order.
"""

import logging
import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, REMOTE, Rows
from moonserve.transfer.rdma.control_messages import MAX_GRANTS, pack_pair
from moonserve.transfer.rdma.device import CHAIN, Completion, CompletionQueue, PairAddress, QueuePair, Runs
from moonserve.transfer.rdma.memory_regions import DeviceRail
from moonserve.transfer.transport_interface import Op

_log = logging.getLogger(__name__)

_SEND_DEPTH = 4 * CHAIN
"""Requests that a queue pair holds. While one chain is in flight the next ones are posted."""

_Owner = TypeVar("_Owner")


@dataclass(slots=True, eq=False)
class SliceWork(Generic[_Owner]):
    """The work requests of one slice. A write completes with the number of its grant."""

    owner: _Owner
    op: Op
    runs: Runs
    local_key: int
    remote_key: int
    immediate: int | None = None
    num_posted: int = 0


class SendQueue(Generic[_Owner]):
    """Posts work to one queue pair within its depth. Used by one thread."""

    def __init__(self, pair: QueuePair, token: int, depth: int) -> None:
        self.pair = pair
        self._token = token
        self._free = depth
        self._waiting: deque[SliceWork[_Owner]] = deque()
        self._posted: deque[tuple[int, SliceWork[_Owner] | None]] = deque()
        """Chains in flight: the number of requests, and the work that ends with the chain, if any."""

    def give_up(self) -> int:
        """Stops posting. Returns the number of chains that have still to end."""
        self._waiting.clear()
        return len(self._posted)

    def submit(self, work: SliceWork[_Owner]) -> None:
        """Queues work, whose runs must not be empty. Raises PeerLost."""
        self._waiting.append(work)
        self._post()

    def completed(self) -> SliceWork[_Owner] | None:
        """Records that the oldest chain ended. Returns the work that ended with it, if any."""
        num_requests, work = self._posted.popleft()
        self._free += num_requests
        self._post()
        return work

    def _post(self) -> None:
        while self._waiting and self._free:
            work = self._waiting[0]
            first = work.num_posted
            runs = work.runs[first : first + min(CHAIN, self._free)]
            work.num_posted += len(runs)
            is_last = work.num_posted == len(work.runs)
            if work.op is Op.READ:
                self.pair.read(self._token, runs, work.local_key, work.remote_key)
            else:
                immediate = work.immediate if is_last else None
                self.pair.write(self._token, runs, work.local_key, work.remote_key, immediate)
            self._free -= len(runs)
            self._posted.append((len(runs), work if is_last else None))
            if is_last:
                self._waiting.popleft()


def runs_of(rows: Rows, remote_base: int, local_base: int, limit_bytes: int) -> Runs:
    """Converts non-empty rows to absolute addresses, with no run longer than the device's message limit."""
    bases = np.zeros(3, dtype=np.int64)
    bases[REMOTE], bases[LOCAL] = remote_base, local_base
    absolute = rows[rows[:, LENGTH] > 0] + bases
    if len(absolute) and int(absolute[:, LENGTH].max()) > limit_bytes:
        return [piece for run in absolute.tolist() for piece in _cut(run, limit_bytes)]
    runs: Runs = absolute.tolist()
    return runs


def _cut(run: list[int], limit_bytes: int) -> list[tuple[int, int, int]]:
    remote, local, nbytes = run
    return [
        (remote + start, local + start, min(limit_bytes, nbytes - start)) for start in range(0, nbytes, limit_bytes)
    ]


class QueuePairSet:
    """The queue pairs of one connection and their shared completion queue."""

    def __init__(self, rail: DeviceRail, count: int, *, serves: bool) -> None:
        device = rail.device
        self._rail = rail
        self.send_depth = 1 if serves else min(_SEND_DEPTH, device.limits.max_send_requests)
        receive_depth = MAX_GRANTS if serves else 1
        self.completions = device.make_completion_queue(count * (self.send_depth + receive_depth))
        self.pairs: list[QueuePair] = []
        try:
            for _ in range(count):
                pair = device.make_queue_pair(
                    self.completions,
                    send_depth=self.send_depth,
                    receive_depth=receive_depth,
                    serves=serves,
                )
                self.pairs.append(pair)
        except BaseException:  # no caller can close it yet
            self.close()
            raise

    def addresses(self) -> bytes:
        """Returns the packed addresses for the peer."""
        device, gid = self._rail.device, self._rail.gid
        return b"".join(pack_pair(pair, gid, device.lid, device.limits) for pair in self.pairs)

    def connect(self, peers: Sequence[PairAddress]) -> None:
        """Connects each pair to the peer's. Raises PeerLost."""
        if len(peers) != len(self.pairs):
            raise PeerLost("the peer created a different number of queue pairs")
        for pair, peer in zip(self.pairs, peers, strict=True):
            pair.connect(peer)

    def fail(self) -> None:
        """Stops all pairs: no byte moves for either side any more. May be called from any thread."""
        for pair in self.pairs:
            with suppress(PeerLost):
                pair.fail()

    def close(self) -> None:
        for pair in self.pairs:
            try:
                pair.close()
            except MoonserveError as error:
                _log.error("a queue pair cannot be destroyed: %s", error)
        self.completions.close()


_BATCH = 32
_SPIN_S = 50e-6
"""Sleeping and waking up cost about as much."""
_BLIND_S = 1e-3
"""Polling interval if the device cannot signal (a completion channel without a known descriptor)."""


class CompletionWaiter:
    """Waits for completions and for the peer's frames. Used by one thread."""

    def __init__(self, socket_descriptor: int, completions: CompletionQueue) -> None:
        self._completions = completions
        self._socket = select.poll()
        self._both = select.poll()
        for poller in (self._socket, self._both):
            poller.register(socket_descriptor, select.POLLIN | select.POLLRDHUP)
        self._device = select.poll()
        if completions.descriptor is not None:
            self._both.register(completions.descriptor, select.POLLIN)
            self._device.register(completions.descriptor, select.POLLIN)

    def wait(self, timeout_s: float | None) -> tuple[list[Completion], bool]:
        """Returns completions, and whether the peer has sent something or hung up."""
        spin_until = time.perf_counter() + _SPIN_S
        while True:
            found, readable = self._completions.poll(_BATCH), bool(self._socket.poll(0))
            if found or readable:
                return found, readable
            if time.perf_counter() > spin_until:
                return self._sleep(timeout_s)

    def completions(self, timeout_s: float) -> list[Completion]:
        """Returns completions only, when the peer may be gone."""
        self._completions.arm()
        if found := self._completions.poll(_BATCH):
            return found
        if self._completions.descriptor is None:
            timeout_s = _BLIND_S
        if self._device.poll(timeout_s * 1000):
            self._completions.acknowledge()
        return self._completions.poll(_BATCH)

    def _sleep(self, timeout_s: float | None) -> tuple[list[Completion], bool]:
        self._completions.arm()
        if found := self._completions.poll(_BATCH):  # completed before `arm`
            return found, False
        descriptor = self._completions.descriptor
        if descriptor is None:
            timeout_s = _BLIND_S
        timeout_ms = None if timeout_s is None else timeout_s * 1000
        ready = {number for number, _ in self._both.poll(timeout_ms)}
        if descriptor in ready:
            self._completions.acknowledge()
            ready.discard(descriptor)
        return self._completions.poll(_BATCH), bool(ready)
