"""Client end of a lean connection in asyncio: the handshake, then any number of concurrent calls.

Every call ends with its reply, at its deadline or with the connection. A call is written at once if no other is in
flight; otherwise the calls of one iteration of the event loop are written together. A broken connection stays broken.
The module does not know what calls mean.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import ssl
from typing import NamedTuple, cast

from protocol.errors import DeadlineExceeded, Incompatible, MoonserveError, Overloaded, PeerLost
from protocol.failures import failure_from_bytes
from protocol.lean import frames, handshake, sockets
from protocol.lean.frames import MAX_CALL_ID, MAX_MESSAGE_BYTES, Reply, Status
from protocol.lean.handshake import Initiator
from protocol.timer import Timer
from protocol.tls import IN_HANDSHAKE, require_address, translated

# Deadlines this close together share one timer.
_TICK_S = 0.002
# Limit of unsent bytes for a peer that does not read: two messages of maximal size.
_MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES


class _Call(NamedTuple):
    reply: asyncio.Future[bytes]
    give_up_at: float


Messages = asyncio.Queue[bytes | MoonserveError | None]
"""Received messages of a stream. The last entry is None, or the error that ended the stream."""


class Connection(asyncio.Protocol):
    def __init__(self, cluster_token: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake has ended; it carries the error of a failed one."""
        self.gone = asyncio.Event()
        self.opened = False
        self.usable = False
        """True from the end of a successful handshake until the connection breaks."""
        self._handshake = Initiator(cluster_token, secrets.token_bytes(handshake.NONCE_BYTES))
        self._arrived = bytearray()
        self._numbers: dict[str, int] = {}
        self._reader = frames.reply_reader()
        self._calls: dict[int, _Call] = {}
        self._streams: dict[int, Messages] = {}
        self._last_id = 0
        self._unwritten: list[bytes] = []
        self._is_full = False
        self._next_deadline: float | None = None
        self._timer = Timer(self._expire, self._loop.time)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.opened = True
        sockets.tune(transport.get_extra_info("socket"))
        try:
            self._require_peer()
        except MoonserveError as error:
            self._break(error)
            return
        self._transport.write(self._handshake.hello)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake.needed:
                data = self._shake_hands(data)
            for reply in self._reader.feed(data):
                self._settle(reply)
        except MoonserveError as error:
            self._break(error)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, ssl.SSLError):  # in TLS 1.3 a peer refuses our certificate only after our first bytes
            self._break(translated(error))
        in_tls = not self.usable and self._transport.get_extra_info("peercert") is not None
        how = IN_HANDSHAKE if in_tls else "broke"
        self._break(PeerLost(f"the connection {how}: {error or 'closed by the peer'}"))
        self._timer.set(None)
        self.gone.set()

    def close(self) -> None:
        self._break(PeerLost("the channel was closed"))

    def offers(self, path: str) -> bool:
        """Returns true if the peer serves this method."""
        return path in self._numbers

    def begin(self, path: str, payload: bytes, give_up_at: float) -> tuple[int, asyncio.Future[bytes]]:
        """Sends a call and returns its id and the future of its reply.

        Raises Incompatible if the peer has no such method, InvalidRequest if the message is too large, and Overloaded
        if the peer does not read.
        """
        call_id = self._ask(path, payload, give_up_at - self._loop.time())
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._calls[call_id] = _Call(reply, give_up_at)
        if self._next_deadline is None or give_up_at < self._next_deadline - _TICK_S:
            self._ring_at(give_up_at)
        return call_id, reply

    def begin_stream(self, path: str, payload: bytes) -> tuple[int, Messages]:
        """Sends a call of a stream, without a deadline, and returns its id and its messages. Raises like `begin`."""
        call_id = self._ask(path, payload, math.inf)
        messages = self._streams[call_id] = Messages()
        return call_id, messages

    def _ask(self, path: str, payload: bytes, timeout_s: float) -> int:
        number = self._numbers.get(path)
        if number is None:
            raise Incompatible(f"the peer has no method {path}")
        if self._is_full and self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise Overloaded("the peer reads slower than it is asked", retry_after_s=0.1)
        call_id = self._new_id()
        self._write(frames.request(call_id, number, timeout_s, payload))
        return call_id

    def give_up(self, call_id: int) -> None:
        """Abandons a call and sends a cancellation to the peer. No-op if the call has ended."""
        call = self._calls.pop(call_id, None) or self._streams.pop(call_id, None)
        if call is not None and self.usable:
            self._write(frames.cancel(call_id))

    def _require_peer(self) -> None:
        """Raises Unauthenticated if the peer's certificate is for another address."""
        certificate = self._transport.get_extra_info("peercert")
        if certificate is not None:
            require_address(certificate, self._transport.get_extra_info("peername")[0])

    def _shake_hands(self, data: bytes) -> bytes:
        """Advances the handshake and returns the bytes that follow it."""
        self._arrived += data
        self._transport.write(handshake.advance(self._handshake, self._arrived))
        if self._handshake.needed:
            return b""
        self._numbers = {path: number for number, path in enumerate(self._handshake.methods)}
        self.usable = True
        if not self.ready.done():
            self.ready.set_result(None)
        return bytes(self._arrived)

    def _new_id(self) -> int:
        while True:
            self._last_id = (self._last_id + 1) & MAX_CALL_ID
            if self._last_id not in self._calls and self._last_id not in self._streams:
                return self._last_id

    def _write(self, frame: bytes) -> None:
        if not self._calls and not self._unwritten:
            self._transport.write(frame)
            return
        if not self._unwritten:
            self._loop.call_soon(self._flush)
        self._unwritten.append(frame)

    def _flush(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"".join(self._unwritten))
        self._unwritten.clear()

    def _settle(self, reply: Reply) -> None:
        if self._streams and (messages := self._streams.get(reply.call_id)) is not None:
            self._settle_stream(messages, reply)
            return
        call = self._calls.pop(reply.call_id, None)
        if call is None or call.reply.done():  # abandoned
            return
        if reply.status == Status.OK:
            call.reply.set_result(reply.payload)
        else:
            call.reply.set_exception(failure_from_bytes(reply.payload))

    def _settle_stream(self, messages: Messages, reply: Reply) -> None:
        if reply.status == Status.MORE:
            messages.put_nowait(reply.payload)
            return
        del self._streams[reply.call_id]
        messages.put_nowait(failure_from_bytes(reply.payload) if reply.status == Status.FAILURE else None)

    def _ring_at(self, when: float) -> None:
        self._next_deadline = when
        self._timer.set(when)

    def _expire(self) -> None:
        due_at = self._loop.time() + _TICK_S
        for call_id, call in list(self._calls.items()):
            if call.give_up_at <= due_at:
                del self._calls[call_id]
                _fail(call.reply, DeadlineExceeded("no reply within the call's deadline"))
        self._next_deadline = None
        if self._calls:
            self._ring_at(min(call.give_up_at for call in self._calls.values()))

    def _break(self, why: MoonserveError) -> None:
        """Marks the connection as broken and fails everything that waits for it. Idempotent."""
        self.usable = False
        _fail(self.ready, why)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            _fail(call.reply, why)
        streams, self._streams = self._streams, {}
        for messages in streams.values():
            messages.put_nowait(why)
        self._transport.abort()


def _fail(waiter: asyncio.Future[bytes] | asyncio.Future[None], why: MoonserveError) -> None:
    if not waiter.done():
        waiter.set_exception(why)
