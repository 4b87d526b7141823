"""READ and WRITE over plain TCP by native code (native/frames.h): one call for a slice in the caller's thread, and at
the target one for as many requests as come.

Anything unusual, a refusal above all, is left to the base classes, which continue where the native code stopped. The
target keeps what it serves natively, by segment and window, only while requests come: none of it stays in memory for
long after its owner gave it up.
"""

import ctypes
import mmap
import time
from typing import NoReturn

from moonserve.protocol.errors import IntegrityError, MoonserveError, PeerLost
from moonserve.protocol.process.native_libraries import c_fields
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import SEAL_BYTES, SHORT_VALUE, PumpEnd, address_of, data_plane
from moonserve.transfer.memory.scatter import MAX_ROWS, Rows
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.memory.write_windows import Window, stale
from moonserve.transfer.tcp.connection import IDLE_NS, SPIN_NS, STEP_NS, Connection
from moonserve.transfer.tcp.frames import HEADER_BYTES, Header, Kind, ProtocolViolation, decode, refusal, unpack_rows
from moonserve.transfer.tcp.handshake import Agreement
from moonserve.transfer.tcp.session import StreamSession
from moonserve.transfer.tcp.target import STALL_S, StreamTarget
from moonserve.transfer.transport_interface import Dial, Op, ServedState, Slice

_DONE, _TIMEOUT = int(PumpEnd.IN_DONE), int(PumpEnd.TIMEOUT)
_OTHER, _CORRUPT, _STALE, _DEREGISTERED = range(int(PumpEnd.ERROR) + 1, int(PumpEnd.ERROR) + 5)
_PLACES = 8
"""Segments, and windows, that a target serves natively at a time."""
_FIELDS = 8
"""Numbers that describe one of them: `Served` in frames.h."""
_KEPT_NS = 500_000_000
"""Time after which the target looks them up again, so that it keeps no memory that its owner has given up."""


class _Exchange(ctypes.Structure):
    """`Exchange` of frames.h."""

    _fields_ = (
        ("flow", ctypes.c_void_p),
        *c_fields(ctypes.c_int64, "fd sealed spin_ns received"),
        *c_fields(ctypes.c_uint64, "bytes sum seal"),
        ("header", ctypes.c_ubyte * HEADER_BYTES),
        ("rows", ctypes.c_ubyte * (MAX_ROWS * scatter.ROW_BYTES + SEAL_BYTES)),
        ("reply", ctypes.c_ubyte * HEADER_BYTES),
        ("pieces", ctypes.c_uint64 * 2 * (MAX_ROWS + 4)),
    )
    received: int

    @classmethod
    def over(cls, connection: Connection) -> "_Exchange":
        """Returns a new one, whose pages exist only once they are used: most connections carry few rows at a time."""
        made = cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))
        made.flow, made.fd = ctypes.addressof(connection.flow.state), connection.descriptor
        made.sealed, made.spin_ns, made.received = connection.seals, SPIN_NS, -1
        return made


class TcpSession(StreamSession):
    """A stream session whose single slices are each one native call."""

    def __init__(self, dial: Dial, connection: Connection, agreed: Agreement) -> None:
        super().__init__(dial, connection, agreed)
        self._native = _Exchange.over(connection)
        self._at = ctypes.addressof(self._native)

    def carry_inline(self, single: Slice) -> None:
        writes, window = single.op is Op.WRITE, single.window_id or 0
        if writes != bool(window) or (self._checksums and single.nbytes <= SHORT_VALUE):
            super().carry_inline(single)
            return
        self._connection.set_deadline(single.deadline_at)
        self._connection.tick = lambda: None
        library, base, rows = self._plane.library, single.local.base, single.rows
        place = address_of(rows)
        end = library.exchange(self._at, base, place, len(rows), single.segment_id, window, single.nbytes, STEP_NS)
        while end == _TIMEOUT:
            self._connection.check_deadline()
            end = library.exchange_more(self._at, base, STEP_NS)
        if end != _DONE:
            self._raise(end, single)

    def _raise(self, end: int, single: Slice) -> NoReturn:
        if end == _OTHER:
            self.accept(bytearray(self._native.reply))
            raise ProtocolViolation("the reply carries text or has a wrong number of bytes")
        if end == _CORRUPT:
            raise IntegrityError(f"{single.nbytes} bytes arrived with a wrong checksum")
        self._connection.raise_ended(end)


class TcpTarget(StreamTarget):
    """A stream target that serves READs and WRITEs natively, and in Python what `serve` of frames.h leaves to it."""

    def __init__(self, connection: Connection, state: ServedState) -> None:
        super().__init__(connection, state)
        self._places = (ctypes.c_int64 * (2 * _PLACES * _FIELDS))()
        self._kept: dict[int, Segment | Window] = {}
        """Owners of what is in the places."""

    def serve(self) -> None:
        self._native = _Exchange.over(self.connection)
        super().serve()

    def next_request(self) -> None:
        kept_ns = _KEPT_NS if self._kept else IDLE_NS
        end = data_plane().library.serve(ctypes.byref(self._native), self._places, kept_ns)
        if end == _TIMEOUT:
            ctypes.memset(self._places, 0, ctypes.sizeof(self._places))
            self._kept.clear()
            return
        if end == _DEREGISTERED:
            raise PeerLost("the segment was deregistered while it was read")
        if end not in (_OTHER, _STALE, _CORRUPT):
            self.connection.raise_ended(end)
        header = decode(bytes(self._native.header))
        if end == _OTHER and not self._native.received and self._keep(header):
            return
        self.connection.set_deadline(time.monotonic() + STALL_S)
        if end == _OTHER:
            self.dispatch(header)
        elif end == _STALE:
            self.connection.discard_rest()
            self.connection.send(refusal(stale(header.window_id)))
        else:
            self.connection.send(refusal(IntegrityError(f"{header.nbytes} bytes arrived with a wrong checksum")))
        self._native.received = -1

    def receive_rows(self, header: Header) -> Rows:
        received = self._native.received
        if not received:
            return super().receive_rows(header)
        return unpack_rows(header, bytes(self._native.rows[:received]), sealed=self.checksums)

    def _keep(self, header: Header) -> bool:
        """Puts what a request reads or writes into its place. Returns False if it is there or cannot be found."""
        owner: Segment | Window
        try:
            if header.kind is Kind.READ:
                owner = segment = self.readable(header.segment_id)
                place, served = header.segment_id % _PLACES, (0, segment.users_address, 0, 0, 0)
            elif header.kind is Kind.WRITE:
                owner = window = self._windows.find(header.window_id, header.segment_id)
                place, segment = _PLACES + header.window_id % _PLACES, window.segment
                served = window.window_id, *window.native
            else:
                return False
        except MoonserveError:
            return False
        if self._kept.get(place) is owner:
            return False
        self._kept[place] = owner
        self._places[place * _FIELDS : (place + 1) * _FIELDS] = [
            header.segment_id,
            segment.base,
            segment.nbytes,
            *served,
        ]
        return True
