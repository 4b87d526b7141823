"""Derives values from their names, so that every byte read can be checked, and runs a load that checks them.

Names are never used twice: a removed object must not come back, whatever happened since.
"""

import random
import time
from collections import Counter
from collections.abc import Callable

from moonserve.kvstore.client import KvStore
from moonserve.protocol.errors import DeadlineExceeded, Overloaded, PeerLost, StaleLease
from tests.background import Background
from tests.patience import PATIENCE_S, until

BLAMELESS = (PeerLost, DeadlineExceeded, Overloaded, StaleLease)
"""Errors that a caller may get while something is broken. Any other error is a bug."""

FOR_EVER = 10**9
"""Value of `kept` for a load that removes nothing."""


def name_of(seed: str, number: int, nbytes: int) -> bytes:
    return f"{seed}/{number}/{nbytes}".encode()


def value_of(name: bytes) -> bytes:
    nbytes = int(name.rpartition(b"/")[2])
    return random.Random(name).randbytes(nbytes)


def put_many(store: KvStore, seed: str, count: int, nbytes: int) -> list[bytes]:
    """Stores `count` values and returns their names."""
    names = [name_of(seed, number, nbytes) for number in range(count)]
    for name in names:
        store.put(name, value_of(name))
    return names


class Load(Background):
    """Puts, reads, verifies and removes objects in a thread of its own while the `with` block lasts.

    It keeps about `kept` objects of less than `nbytes` each, and reads only objects that it has stored and not removed.
    It rests `pause_s` before each step, so that a wait under load leaves the processor to the process waited for.
    """

    ends_within_s = 2 * PATIENCE_S

    def __init__(
        self,
        store: KvStore,
        seed: str,
        *,
        nbytes: int = 60_000,
        kept: int = 300,
        timeout_s: float = 30.0,
        pause_s: float = 0.002,
    ) -> None:
        super().__init__([self._go_on])
        self.stored: list[bytes] = []
        self.removed: set[bytes] = set()
        self.uncertain: set[bytes] = set()
        """Names whose put or removal is in flight or has failed."""
        self.missed = 0
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._store = store
        self._seed = seed
        self._rng = random.Random(seed)
        self._nbytes = nbytes
        self._kept = kept
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._number = 0
        self._unfinished: bytes | None = None

    def go_on(self, count: int = 20, *, what: str = "put") -> None:
        """Waits until `count` more calls of this kind have succeeded."""
        wanted = self.done[what] + count
        until(lambda: self.done[what] >= wanted or self.failures)
        assert not self.failures, "\n".join(self.failures)

    def go_on_for(self, duration_s: float) -> None:
        """Waits for `duration_s`, during which puts and gets must keep succeeding."""
        ends_at = time.monotonic() + duration_s
        while time.monotonic() < ends_at:
            for what in ("put", "get"):
                self.go_on(1, what=what)

    def _go_on(self) -> None:
        while not self.stopping.wait(self._pause_s):
            if len(self.stored) > self._kept:
                self._attempt("remove", self._remove)
            self._attempt("put", self._put)
            self._attempt("get", self._get)

    def _attempt(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BLAMELESS as error:
            self.errors[type(error).__name__] += 1
        else:
            self.done[what] += 1

    def _put(self) -> None:
        """Puts a new value, or retries the last one if it failed: it may have been stored nevertheless."""
        if (name := self._unfinished) is None:
            self._number += 1
            name = self._unfinished = name_of(self._seed, self._number, self._rng.randrange(self._nbytes))
        self.uncertain.add(name)
        self._store.put(name, value_of(name), timeout_s=self._timeout_s)
        self._unfinished = None
        self.uncertain.discard(name)
        self.stored.append(name)

    def _get(self) -> None:
        if not self.stored:
            return
        name = self._rng.choice(self.stored)
        value = self._store.get(name, timeout_s=self._timeout_s)
        self.missed += value is None
        assert value is None or value == value_of(name), f"wrong bytes for {name!r}"

    def _remove(self) -> None:
        name = self.stored.pop(self._rng.randrange(len(self.stored) // 2 + 1))
        self.uncertain.add(name)
        self._store.remove(name, timeout_s=self._timeout_s)
        self.removed.add(name)
        self.uncertain.discard(name)
