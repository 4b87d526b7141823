"""Waits for two things at once: completions of the device and frames of the peer.

First it looks again and again for a moment, then it asks the device for an event and sleeps in poll(2),
where other threads run. An idle connection costs nothing.
"""

from __future__ import annotations

import select
import time

from transfer.rdma.fabric import Completion, CompletionQueue

_BATCH = 32
_SPIN_S = 50e-6
"""A sleep and the wake-up from it cost about as much."""
_BLIND_S = 1e-3
"""How often to look where the device cannot tell (a completion channel without a known descriptor)."""


class Waiter:
    """Used by one thread."""

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
        """What has completed, and whether the peer has sent something (or hung up)."""
        spin_until = time.perf_counter() + _SPIN_S
        while True:
            found, readable = self._completions.poll(_BATCH), bool(self._socket.poll(0))
            if found or readable:
                return found, readable
            if time.perf_counter() > spin_until:
                return self._sleep(timeout_s)

    def completions(self, timeout_s: float) -> list[Completion]:
        """The same without the peer, who may be gone."""
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
        if found := self._completions.poll(_BATCH):  # came before the device was told to tell
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
