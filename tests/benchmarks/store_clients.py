"""Clients that behave badly, for the tests of the store benchmark's driver."""

from __future__ import annotations

import os
import threading
from typing import Any

from benchmarks.store import memcpy

Call = list[tuple[Any, Any]]


class Lying(memcpy.Client):
    """Leaves the last value of every call out."""

    def get(self, call: Call) -> None:
        self.put(call[:-1])


class Dying(memcpy.Client):
    def get(self, call: Call) -> None:
        os.write(2, b"the disk is on fire\n")
        os._exit(1)


class Hanging(memcpy.Client):
    def get(self, call: Call) -> None:
        threading.Event().wait()
