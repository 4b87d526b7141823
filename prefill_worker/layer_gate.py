"""Where the engine's thread waits for a prefix that arrives layer by layer.

Its rules: whoever waits is told when nothing more will come; all waits of one step together are bounded, whatever the
store does; what has arrived is there and nothing more is said about it: whether the bytes are good is known when the
whole load is. Knows neither stores nor blocks.
"""

from __future__ import annotations

import threading
import time


class PrefixLate(Exception):
    """A layer of the prefix did not come in time, or will not come: the step is not worth going on with."""


class LayerGate:
    """How many leading layers of one prefix are in the pool. The event loop says so, the engine's thread waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_layers = 0
        self._is_closed = False

    @property
    def num_layers(self) -> int:
        return self._num_layers

    def arrived(self, num_layers: int) -> None:
        """The first `num_layers` layers are there."""
        with self._changed:
            self._num_layers = num_layers
            self._changed.notify_all()

    def close(self) -> None:
        """No further layer will come. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> None:
        """Blocks the thread until `layer` is there. Raises PrefixLate."""
        if self._num_layers > layer:  # the usual case, without the lock
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_layers > layer or self._is_closed, max(timeout_s, 0.0)
            )
            if self._num_layers <= layer:
                raise PrefixLate(f"layer {layer} of a prefix: {self._num_layers} are there")


class BoundedWait:
    """One step's waits at a gate: in all at most `limit_s`. Used by the engine's thread, read when the step is over."""

    def __init__(self, gate: LayerGate, limit_s: float) -> None:
        self._gate = gate
        self._limit_s = limit_s
        self.waited_s = 0.0

    def before(self, layer: int) -> None:
        """Returns when the prefix's `layer` may be looked at. Raises PrefixLate."""
        if self._gate.num_layers > layer:
            return
        began_at = time.monotonic()
        try:
            self._gate.wait(layer, self._limit_s - self.waited_s)
        finally:
            self.waited_s += time.monotonic() - began_at
