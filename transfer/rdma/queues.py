"""The send queue of a queue pair, and the joint wait for completions and the peer's frames.

No more requests are posted than the queue holds. A chain's completion frees all of its requests, since a reliable
connection completes requests in order.
"""

from __future__ import annotations

import select
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from transfer.base import Op
from transfer.rdma.fabric import CHAIN, Completion, CompletionQueue, QueuePair, Runs
from transfer.scatter import LENGTH, LOCAL, REMOTE, Rows

_Owner = TypeVar("_Owner")


@dataclass(slots=True, eq=False)
class Work(Generic[_Owner]):
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
        self._waiting: deque[Work[_Owner]] = deque()
        self._posted: deque[tuple[int, Work[_Owner] | None]] = deque()
        """Chains in flight: the number of requests, and the work that ends with the chain, if any."""

    def give_up(self) -> int:
        """Stops posting. Returns the number of chains that have still to end."""
        self._waiting.clear()
        return len(self._posted)

    def submit(self, work: Work[_Owner]) -> None:
        """Queues work, whose runs must not be empty. Raises PeerLost."""
        self._waiting.append(work)
        self._post()

    def completed(self) -> Work[_Owner] | None:
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
            self._post_chain(work, runs, work.immediate if is_last else None)
            self._free -= len(runs)
            self._posted.append((len(runs), work if is_last else None))
            if is_last:
                self._waiting.popleft()

    def _post_chain(self, work: Work[_Owner], runs: Runs, immediate: int | None) -> None:
        if work.op is Op.READ:
            self.pair.read(self._token, runs, work.local_key, work.remote_key)
        else:
            self.pair.write(self._token, runs, work.local_key, work.remote_key, immediate)


def runs_of(rows: Rows, remote_base: int, local_base: int, limit_bytes: int) -> Runs:
    """Converts non-empty rows to absolute addresses, with no run longer than the device's message limit."""
    absolute = rows[rows[:, LENGTH] > 0] + _bases(remote_base, local_base)
    if len(absolute) and int(absolute[:, LENGTH].max()) > limit_bytes:
        return [piece for run in absolute.tolist() for piece in _cut(run, limit_bytes)]
    runs: Runs = absolute.tolist()
    return runs


def _bases(remote_base: int, local_base: int) -> Rows:
    bases = np.zeros(3, dtype=np.int64)
    bases[REMOTE], bases[LOCAL] = remote_base, local_base
    return bases


def _cut(run: list[int], limit_bytes: int) -> list[tuple[int, int, int]]:
    remote, local, nbytes = run
    return [
        (remote + start, local + start, min(limit_bytes, nbytes - start)) for start in range(0, nbytes, limit_bytes)
    ]


_BATCH = 32
_SPIN_S = 50e-6
"""Sleeping and waking up cost about as much."""
_BLIND_S = 1e-3
"""Polling interval if the device cannot signal (a completion channel without a known descriptor)."""


class Waiter:
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
