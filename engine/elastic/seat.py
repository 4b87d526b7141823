"""One worker's access to the ledger of its host, in units of its own pages, with a bell for notifications.

Other workers ring the bell when something has changed for this one. The bell is a datagram socket in Linux's abstract
namespace, so a dead worker leaves nothing behind. If a ring is lost, the waiting worker notices at its next poll.
"""

from __future__ import annotations

import contextlib
import socket

from engine.elastic.ledger import Ledger
from engine.elastic.paged_blanks import Supply
from protocol.errors import ConfigError


class Seat(Supply):
    """Page supply of one worker that shares a budget with others. Not thread-safe."""

    def __init__(self, ledger: Ledger, name: str, *, page_bytes: int, floor: int, ceiling: int) -> None:
        """Claims a row of the ledger and binds the bell. `floor` and `ceiling` in bytes. Raises ConfigError."""
        self._ledger = ledger
        self._page_bytes = page_bytes
        self._number = ledger.claim(name, self._whole(floor), ceiling)
        self._asked = 0
        self._spare = 0
        self.bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bell.setblocking(False)
        try:
            self.bell.bind(self._address(self._number))
        except OSError as error:
            raise ConfigError(f"{name} cannot be rung at by the other workers: {error}") from error

    def take(self, count: int) -> int:
        return self._ledger.take(self._number, count, self._page_bytes)

    def give(self, count: int) -> None:
        self._ledger.give(self._number, count * self._page_bytes)
        self._ring(only_waiting=True)
        self.look()

    def room(self) -> int:
        own, budget = self._ledger.share_of(self._number)
        return budget.room(own) // self._page_bytes

    def most(self) -> int:
        own, budget = self._ledger.share_of(self._number)
        return budget.most(own) // self._page_bytes

    def want(self, count: int) -> None:
        self._ledger.want(self._number, count * self._page_bytes)
        if count:
            self._ring()

    def spare(self, count: int) -> None:
        self._spare = count
        self._ledger.spare(self._number, count * self._page_bytes)

    def asked_back(self) -> int:
        return self._asked

    def look(self) -> None:
        """Updates `asked_back`, the number of pages that others request from this worker. A worker that waits itself
        gives only to workers that hold less, any other worker all that it can spare."""
        own, budget = self._ledger.share_of(self._number)
        asked = -(-budget.spare_asked(own) // self._page_bytes)
        self._asked = min(asked, max(0, own.held - own.floor) // self._page_bytes)

    def limit(self, floor: int, ceiling: int) -> None:
        """Changes floor and ceiling, in bytes. Raises ConfigError."""
        self._ledger.limit(self._number, self._whole(floor), ceiling)

    def _whole(self, floor: int) -> int:
        """Rounds a floor down to whole pages. Otherwise others would count the part of a page above the floor as spare,
        and wait for bytes that can never be given back."""
        return floor // self._page_bytes * self._page_bytes

    @property
    def budget(self) -> int:
        """Budget of all workers, in bytes."""
        return self._ledger.budget

    def resize(self, budget: int) -> None:
        """Changes the budget of all workers, in bytes. Raises ConfigError."""
        self._ledger.resize(budget)
        self._ring()
        self.look()

    def answer(self) -> None:
        """Drains the bell."""
        with contextlib.suppress(BlockingIOError):
            while self.bell.recv(1):
                pass

    def close(self) -> None:
        self.bell.close()
        self._ledger.close()

    def _ring(self, *, only_waiting: bool = False) -> None:
        for row in self._ledger.rows():
            if row.number != self._number and (row.wanted or not only_waiting):
                with contextlib.suppress(OSError):  # the worker is gone, or its bell is already ringing
                    self.bell.sendto(b"!", self._address(row.number))

    def _address(self, number: int) -> str:
        return f"\0moonserve-kv-{self._ledger.identity}-{number}"
