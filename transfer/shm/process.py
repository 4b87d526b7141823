"""A peer's memory that cannot be mapped: what its process registered, read with process_vm_readv.

Owns the check that what was read still meant something: a marker, a page of shared memory that the
owner clears when it deregisters the segment. Where the kernel does not permit such reading there is
none of this, and the bytes travel on the connection.
"""

from __future__ import annotations

import errno
import threading

import numpy as np

from protocol.errors import InvalidRequest, PeerLost
from transfer import scatter
from transfer.native import address_of, data_plane
from transfer.native.process_memory import OtherProcess
from transfer.rows import LENGTH, LOCAL, REMOTE, Rows
from transfer.shm.memfd import PeerMemory


class ProcessMemory:
    """`copying.Source` over another process's addresses. Does not own `process`."""

    def __init__(self, process: OtherProcess, base: int, nbytes: int, marker: PeerMemory) -> None:
        """Takes the marker over. Raises OSError when its ends cannot be read, PeerLost for nonsense."""
        if nbytes <= 0 or base <= 0 or base + nbytes > 1 << 63:
            raise PeerLost("the peer offered memory that cannot be")
        self.nbytes = nbytes
        self._process = process
        self._base = base
        self._marker = marker
        self._lock = threading.Lock()
        """Of the scratch memory."""
        self._scratch = bytearray()
        probe = bytearray(2)
        ends = scatter.rows((0, 0, 1), (nbytes - 1, 1, 1))
        process.read(address_of(probe), base, ends, to_column=LOCAL)

    def copy(self, to: int, rows: Rows, *, to_column: int) -> None:
        try:
            self._process.read(to, self._base, rows, to_column=to_column)
        except ProcessLookupError as error:
            raise PeerLost("the peer's process has ended") from error
        except OSError as error:
            self.require_live()
            reason = errno.errorcode.get(error.errno or 0, "")
            raise InvalidRequest(f"the peer's memory cannot be read: {reason}") from error

    def copy_verified(self, to: int, rows: Rows, *, to_column: int) -> bool:
        """By a second copy, as the bytes cannot be read in place."""
        self.copy(to, rows, to_column=to_column)
        lengths = rows[:, LENGTH]
        packed_at = np.cumsum(lengths) - lengths
        nbytes = scatter.total(rows)
        with self._lock:
            if len(self._scratch) < nbytes:
                self._scratch = bytearray(nbytes)
            packed = address_of(self._scratch)
            self.copy(
                packed, np.stack((rows[:, 1 - to_column], packed_at, lengths), 1), to_column=LOCAL
            )
            places = np.stack((rows[:, to_column], packed_at, lengths), 1)
            return data_plane().rows_equal(to, packed, places, column=REMOTE)

    def require_live(self) -> None:
        self._marker.require_live()

    @property
    def live(self) -> bool:
        return self._marker.live

    def close(self) -> None:
        self._marker.close()
