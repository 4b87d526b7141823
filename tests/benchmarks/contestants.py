"""Contestants that behave badly, for the tests of the benchmark's driver."""

from __future__ import annotations

import os
import threading
from typing import Any

from benchmarks.transfer.limits.memory import CopyInitiator, CopyTarget


class LyingTarget(CopyTarget):
    pass


class LyingInitiator(CopyInitiator):
    """Leaves the last block of every batch out."""

    def post(self, batch: list[Any]) -> None:
        super().post(batch[:-1])


class DyingTarget(CopyTarget):
    pass


class DyingInitiator(CopyInitiator):
    def post(self, batch: list[Any]) -> None:
        os.write(2, b"the disk is on fire\n")
        os._exit(1)


class HangingTarget(CopyTarget):
    pass


class HangingInitiator(CopyInitiator):
    def post(self, batch: list[Any]) -> None:
        threading.Event().wait()
