"""Memory that a peer on the same host can map: created and written here, mapped read-only there.

Owns the layout of such a file: the data, then one page whose first byte says whether the segment is
still registered. Its seals are the rule: nobody can shrink it under a reader (SIGBUS) and, once the
owner has mapped it, nobody can ever map it writable again. Linux ≥ 5.1.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from protocol.errors import InvalidRequest, PeerLost

_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python names it from 3.14 on
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
_PAGE = mmap.PAGESIZE
_LIVE = 1


def _marker(nbytes: int) -> int:
    """Offset of the byte that says whether the segment is registered."""
    return -(-nbytes // _PAGE) * _PAGE


class OwnedMemory:
    """A sealed memfd and the only writable mapping of it, with every page already present."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("moonserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _marker(nbytes) + _PAGE)
            self._map = mmap.mmap(self.fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self.fd)
            raise
        self._marker = _marker(nbytes)
        self._map[self._marker] = _LIVE
        self.view = memoryview(self._map)[:nbytes]

    def retire(self) -> None:
        """Peers that still map it see from now on that its content means nothing."""
        self._map[self._marker] = 0
        os.close(self.fd)


class PeerMemory:
    """A peer's memfd, mapped read-only; owns neither the content nor the passed descriptor."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises PeerLost when the file is not sealed as `OwnedMemory` seals it or too small."""
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            size = os.fstat(fd).st_size
            if not sealed or not 0 < nbytes <= size - _PAGE:
                raise PeerLost("the peer offered memory that could change under us")
            # Not populated: the pages exist already and fault in 16 at a time when they are first read, while
            # populating 256 MiB would hold up the first transfer from a peer by tens of milliseconds.
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise PeerLost("the peer offered memory that cannot be mapped") from error
        self._marker = _marker(nbytes)
        self.nbytes = nbytes
        self.view = memoryview(self._map)[:nbytes]

    def require_live(self) -> None:
        """Raises InvalidRequest once the owner has deregistered the segment."""
        if self._map[self._marker] != _LIVE:
            raise InvalidRequest("the peer's segment is no longer registered")

    @property
    def live(self) -> bool:
        return self._map[self._marker] == _LIVE

    def close(self) -> None:
        self.view.release()
        self._map.close()
