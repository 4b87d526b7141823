"""Allocates the node's index in transfer-engine segments, which peers map and READ. A growing index takes a new one.

A retired segment is kept for a while, so that a reader in the middle of it learns from its header instead of from an
error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from protocol.errors import InvalidRequest
from transfer import Segment, TransferEngine

log = logging.getLogger(__name__)

RETIRED_S = 10.0


class IndexSegments:
    """The segments of one `KeyIndex`, which takes `allocate` and `retire`."""

    def __init__(self, transfer: TransferEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._transfer = transfer
        self._clock = clock
        self._segment: Segment | None = None
        self._retired: list[tuple[float, Segment]] = []

    @property
    def segment_id(self) -> int:
        """Id of the segment in use."""
        assert self._segment is not None
        return self._segment.segment_id

    def allocate(self, nbytes: int) -> memoryview:
        """Allocates zeroed memory for an index, which becomes the segment in use."""
        if self._segment is not None:
            self._retired.append((self._clock() + RETIRED_S, self._segment))
        self._segment = self._transfer.allocate(nbytes, readable=True, name="index")
        return self._segment.buffer

    def retire(self, memory: memoryview) -> None:
        """Deregisters segments that were retired RETIRED_S ago. `memory`, now retired, is no longer written to."""
        now = self._clock()
        due = [segment for at, segment in self._retired if at <= now]
        self._retired = [(at, segment) for at, segment in self._retired if at > now]
        for segment in due:
            try:
                self._transfer.deregister(segment)
            except InvalidRequest as error:  # the engine is closing
                log.info("index segment not given back: %s", error)
