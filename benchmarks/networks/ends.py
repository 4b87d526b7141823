"""Processes at both ends of a link, on two hosts: `target` serves memory, `initiator` and `raw` load the link.

Each prints one JSON line. The target ends with its stdin.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions

TOKEN = "networks"
POOL_BYTES = 64 << 20
BATCH_BYTES = 8 << 20
IN_FLIGHT = 4
"""Batches in flight at a time, as from a worker."""
DEADLINE_S = 120.0
RAW_PORT = 6000


def target(host: str, streams: str) -> None:
    """Offers a segment for reads and writes, and discards the data of raw connections."""
    options = TransferOptions(host=host, transports=("tcp",), streams=int(streams))
    with (
        TransferEngine(cluster_token=TOKEN, options=options) as engine,
        socket.create_server((host, RAW_PORT)) as listener,
    ):
        segment = engine.allocate(POOL_BYTES, readable=True)
        window = engine.open_window(segment, [(0, POOL_BYTES)])
        threading.Thread(target=_swallow, args=[listener], daemon=True).start()
        _say({"address": engine.address, "segment": segment.segment_id, "window": window})
        sys.stdin.read()


def initiator(host: str, streams: str, address: str, segment: str, window: str, op: str, seconds: str) -> None:
    """Keeps batches in flight for `seconds` and prints bytes per second; the start-up phase does not count."""
    options = TransferOptions(host=host, transports=("tcp",), streams=int(streams))
    with TransferEngine(cluster_token=TOKEN, options=options) as engine:
        local = engine.allocate(POOL_BYTES)
        remote = RemoteSegment(address, int(segment))

        def one(number: int) -> Callable[[], None]:
            offset = number * BATCH_BYTES % POOL_BYTES
            transfer = Transfer(
                op=Op(op),
                local=local,
                local_offset=offset,
                remote=remote,
                remote_offset=offset,
                length=BATCH_BYTES,
                window_id=int(window) if op == "write" else None,
            )
            return engine.submit([transfer], deadline_s=DEADLINE_S).wait

        _say({"bytes_per_s": _steady(one, BATCH_BYTES, float(seconds))})


def raw(host: str, address: str, seconds: str) -> None:
    """Does the same over one plain connection, as the limit of the link and the kernel."""
    chunk = bytes(1 << 20)
    with socket.create_connection((address, RAW_PORT), source_address=(host, 0)) as sock:

        def one(_: int) -> Callable[[], None]:
            return lambda: sock.sendall(chunk)

        _say({"bytes_per_s": _steady(one, len(chunk), float(seconds))})


def _steady(begin: Callable[[int], Callable[[], None]], num_bytes: int, seconds: float) -> float:
    """Returns bytes per second after the first quarter of the time, in which the sender finds the link's rate. The time
    is measured between ends of batches, because a slow link completes few."""
    started_at = time.monotonic()
    waiting = deque(begin(number) for number in range(IN_FLIGHT))
    number, done = IN_FLIGHT, 0
    counted_at, ended_at = 0.0, started_at
    while ended_at < started_at + seconds or done == 0:
        waiting.popleft()()
        ended_at = time.monotonic()
        if counted_at:
            done += num_bytes
        elif ended_at > started_at + seconds / 4:
            counted_at = ended_at
        waiting.append(begin(number))
        number += 1
    rate = done / (ended_at - counted_at)
    for wait in waiting:
        wait()
    return rate


def _swallow(listener: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while True:
        sock, _ = listener.accept()
        with sock:
            while sock.recv_into(buffer):
                pass


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ENDS: dict[str, Callable[..., None]] = {"target": target, "initiator": initiator, "raw": raw}
    ENDS[sys.argv[1]](*sys.argv[2:])
