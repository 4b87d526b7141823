"""What one connection's peer has lent us: mapped where it can be, read by address where that is permitted.

Used by both ends: the initiator reads the target's segments, the target what the initiator offered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from transfer.native.process_memory import OtherProcess
from transfer.shm.copying import Source
from transfer.shm.memfd import PeerMemory
from transfer.shm.process import ProcessMemory

_log = logging.getLogger(__name__)


class Sources:
    """By the peer's segment id; None for memory that only the connection can carry."""

    def __init__(self, peer_pid: Callable[[], int]) -> None:
        self._peer_pid = peer_pid
        self._sources: dict[int, Source | None] = {}
        self._process: OtherProcess | None = None

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, segment_id: int) -> bool:
        return segment_id in self._sources

    def get(self, segment_id: int) -> Source | None:
        return self._sources.get(segment_id)

    def add(self, segment_id: int, fd: int | None, base: int, nbytes: int) -> None:
        """`fd` is the memory itself, or with a `base` in the peer's process its marker.

        The descriptor stays the caller's. Raises PeerLost for memory that could change under us.
        """
        self._drop_dead()
        if fd is None:
            self._sources[segment_id] = None
        elif base:
            self._sources[segment_id] = self._readable(base, nbytes, PeerMemory(fd, 1))
        else:
            self._sources[segment_id] = PeerMemory(fd, nbytes)

    def _readable(self, base: int, nbytes: int, marker: PeerMemory) -> Source | None:
        try:
            if self._process is None:
                self._process = OtherProcess(self._peer_pid())
            return ProcessMemory(self._process, base, nbytes, marker)
        except OSError as error:  # not permitted, or another pid namespace
            _log.info("memory of the peer's process cannot be read here: %s", error)
            marker.close()
            return None

    def _drop_dead(self) -> None:
        """Unmaps what its owner has deregistered, so that its pages can go."""
        for segment_id, source in list(self._sources.items()):
            if source is not None and not source.live:
                source.close()
                del self._sources[segment_id]

    def close(self) -> None:
        for source in self._sources.values():
            if source is not None:
                source.close()
        self._sources.clear()
        if self._process is not None:
            self._process.close()
            self._process = None
