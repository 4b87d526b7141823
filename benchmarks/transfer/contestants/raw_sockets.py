"""Raw TCP over loopback: one connection and one thread per process, directly from and into the pool.

The sender may be `outstanding` batches ahead of short acknowledgements, like the batches in flight of every contestant.
A mode consists of the calls ("plain": sendall / recv_into per block, "iovec": sendmsg / recvmsg_into), the way to wait
("block", or "spin": non-blocking with a limited number of sched_yield, then poll) and the size of the socket buffers in
KiB (0 = the system's default).
"""

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from benchmarks.transfer import contestant
from benchmarks.transfer.contestant import private_pool
from benchmarks.transfer.workload import LOCAL, REMOTE, Bytes, Load

CALLS = ("plain", "iovec")
WAITS = ("block", "spin")
BUFFERS_KIB = (0, 64, 128, 256, 512)
MODES = tuple(f"{c} {w} {b}" for c in CALLS for w in WAITS for b in BUFFERS_KIB)
SPINS = 200
VECTORS = 512
SWEEP, NEXT, END = b"S" * 64, b"N" * 64, b"E" * 64
"""Longer than one byte, because messages of up to 8 bytes ahead of the payload nearly doubled its measured CPU cost, by
either sender (0.62 instead of 0.36 s/GB). Messages of 16 bytes and more cost nothing."""

View = memoryview


class Stream:
    """A connection that sends and receives blocks in one mode."""

    def __init__(self, connection: socket.socket, mode: str) -> None:
        call, wait, _ = mode.split()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(wait == "block")
        self._connection = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self.send = self._send_plain if call == "plain" else self._send_vectors
        self.receive = self._receive_plain if call == "plain" else self._receive_vectors

    def signal(self, signal: bytes) -> None:
        self._send_plain([View(signal)])

    def await_signal(self) -> bytes:
        signal = bytearray(len(NEXT))
        self._receive_plain([View(signal)])
        return bytes(signal)

    def _send_plain(self, blocks: list[View]) -> None:
        if self._connection.getblocking():
            for block in blocks:
                self._connection.sendall(block)
            return
        for block in blocks:
            sent = 0
            while sent < len(block):
                sent += self._ready(self._writable, self._connection.send, block[sent:])

    def _receive_plain(self, blocks: list[View]) -> None:
        for block in blocks:
            come = 0
            while come < len(block):
                come += _some(self._ready(self._readable, self._connection.recv_into, block[come:]))

    def _send_vectors(self, blocks: list[View]) -> None:
        while blocks:
            sent = self._ready(self._writable, self._connection.sendmsg, blocks[:VECTORS])
            blocks = _rest(blocks, sent)

    def _receive_vectors(self, blocks: list[View]) -> None:
        while blocks:
            come = self._ready(self._readable, self._receive_message, blocks[:VECTORS])
            blocks = _rest(blocks, _some(come))

    def _receive_message(self, blocks: list[View]) -> int:
        return self._connection.recvmsg_into(blocks)[0]

    @staticmethod
    def _ready(poll: select.poll, call: Callable[[Any], int], argument: Any) -> int:
        spins = 0
        while True:
            try:
                return call(argument)
            except BlockingIOError:
                spins += 1
                if spins < SPINS:
                    os.sched_yield()
                else:
                    poll.poll()


def _some(count: int) -> int:
    if not count:
        raise ConnectionError("the other side closed the connection")
    return count


def _rest(blocks: list[View], count: int) -> list[View]:
    """Returns the rest of the blocks after the first `count` bytes."""
    for number, block in enumerate(blocks):
        if count < len(block):
            return [block[count:], *blocks[number + 1 :]] if count else blocks[number:]
        count -= len(block)
    return []


def _views(pool: Bytes, load: Load, end: int) -> list[list[View]]:
    whole, length = View(pool.data), load.block_bytes
    return [[whole[at : at + length] for at in batch[..., end].reshape(-1).tolist()] for batch in load.batches()]


def _set_buffers(connection: socket.socket, mode: str) -> None:
    nbytes = int(mode.split()[2]) << 10
    if nbytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._listeners = {mode: _listener(mode) for mode in MODES}
        self._streams: dict[str, Stream] = {}

    def hello(self) -> dict[str, Any]:
        return {mode: at.getsockname()[1] for mode, at in self._listeners.items()}

    def connect(self, other: dict[str, Any]) -> None:
        for mode, listener in self._listeners.items():
            self._streams[mode] = Stream(listener.accept()[0], mode)

    def serve(self, load: Load, mode: str, stopped: Callable[[], bool]) -> None:
        stream = self._streams[mode]
        batches = _views(self.pool, load, REMOTE)
        step = self._answer if load.op == "read" else self._accept
        while stream.await_signal() == SWEEP:
            step(stream, load, batches)

    @staticmethod
    def _answer(stream: Stream, load: Load, batches: list[list[View]]) -> None:
        for number, batch in enumerate(batches):
            if number >= load.outstanding:
                stream.await_signal()
            stream.send(batch)

    @staticmethod
    def _accept(stream: Stream, load: Load, batches: list[list[View]]) -> None:
        for batch in batches:
            stream.receive(batch)
            stream.signal(NEXT)


def _listener(mode: str) -> socket.socket:
    listener = socket.socket()
    _set_buffers(listener, mode)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1)
    return listener


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._streams: dict[str, Stream] = {}

    def connect(self, other: dict[str, Any]) -> None:
        for mode, port in other.items():
            connection = socket.socket()
            _set_buffers(connection, mode)
            connection.connect(("127.0.0.1", port))
            self._streams[mode] = Stream(connection, mode)

    def prepare(self, load: Load, mode: str) -> None:
        self.load, self._stream = load, self._streams[mode]
        self.batches = _views(self.pool, load, LOCAL)

    def sweep(self) -> None:
        self._stream.signal(SWEEP)
        if self.load.op == "read":
            self._read()
        else:
            self._write()

    def _read(self) -> None:
        asked = self.load.outstanding
        for batch in self.batches:
            self._stream.receive(batch)
            if asked < len(self.batches):
                self._stream.signal(NEXT)
                asked += 1

    def _write(self) -> None:
        for number, batch in enumerate(self.batches):
            if number >= self.load.outstanding:
                self._stream.await_signal()
            self._stream.send(batch)
        for _ in self.batches[-self.load.outstanding :]:
            self._stream.await_signal()

    def latencies(self) -> list[float]:
        took, request = [], SWEEP
        for batch in self.batches:
            begin = time.perf_counter()
            self._stream.signal(request)
            self._stream.receive(batch)
            took.append(time.perf_counter() - begin)
            request = NEXT
        return took

    def done(self) -> None:
        self._stream.signal(END)
        self.batches = []
