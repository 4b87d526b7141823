"""Faults of links and of peers that are what they claim: resets, silence, slowness, damage."""

from __future__ import annotations

import contextlib
import threading
import time

from protocol.errors import (
    IntegrityError,
    PeerLost,
)
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import PeerInProcess
from tests.transfer.proxy import Towards, Trouble
from tests.transfer.stage import (
    NBYTES,
    Stage,
    code_of_answer,
    fault,
    request_of,
)
from transfer import Op, Transfer
from transfer.stats import Incident
from transfer.tcp import handshake
from transfer.tcp.frames import HEADER_BYTES, Code, Kind

_HANDSHAKE_TO_TARGET = handshake._HELLO.size + handshake._PROOF.size
_HANDSHAKE_TO_INITIATOR = handshake._CHALLENGE.size + handshake._WELCOME.size
_READ_FRAME = HEADER_BYTES + 24 + 8


# Connections that end.


@fault("connection reset in the middle of a WRITE", "tcp")
def reset_write(stage: Stage) -> str:
    proxy, address = stage.proxy()
    proxy.reset = Trouble(Towards.TARGET, at=1 << 20)
    stage.run(stage.write(address))
    stage.require_arrived()
    assert stage.count(Incident.RETRY) > 0
    return "dialled again, the first connection fenced, the rest sent again; right bytes"


@fault("connection reset in the middle of a READ", "tcp")
def reset_read(stage: Stage) -> str:
    proxy, address = stage.proxy()
    proxy.reset = Trouble(Towards.INITIATOR, at=1 << 20)
    stage.run(stage.read(address))
    stage.require_arrived()
    return "dialled again, the rest read again; right bytes"


@fault("connection reset again and again", "tcp", deadline_s=NEVER_S)
def reset_always(stage: Stage) -> str:
    proxy, address = stage.proxy()
    proxy.reset = Trouble(Towards.INITIATOR, at=300_000, times=1000)
    stage.run(stage.read(address), error=PeerLost)
    assert proxy.num_connections == 2
    return "PeerLost after the second connection, long before the deadline"


@fault("SIGKILL of the target", "tcp", "shm", deadline_s=NEVER_S)
def killed(stage: Stage) -> str:
    peer = stage.peer()
    transfer = _to_process(stage, peer)
    stage.run(transfer)
    peer.stop()  # so that the batch is under way for certain
    batch = stage.near.submit([transfer], deadline_s=stage.deadline_s)
    peer.process.kill()
    begin = time.monotonic()
    with contextlib.suppress(PeerLost):
        batch.wait(PATIENCE_S)
    stage.took_s = time.monotonic() - begin
    assert isinstance(batch.errors[0], PeerLost)
    stage.run(transfer, error=PeerLost)
    return "PeerLost at once; so are later batches"


def _to_process(stage: Stage, peer: PeerInProcess) -> Transfer:
    remote, window_id = peer.lend(NBYTES)
    return Transfer(Op.WRITE, stage.local.segment, 0, remote, 0, NBYTES, window_id)


# Peers and links that fall silent.


@fault("SIGSTOP of the target, then SIGCONT", "tcp", "shm", deadline_s=1)
def stopped(stage: Stage) -> str:
    peer = stage.peer()
    transfer = _to_process(stage, peer)
    stage.run(transfer)
    peer.stop()
    stage.run_until_the_deadline(transfer)
    peer.resume()
    stage.run(transfer)
    return "PeerLost at the deadline; after SIGCONT the next batch arrives"


@fault("silent drop in the middle of a READ", "tcp", deadline_s=1)
def silent_read(stage: Stage) -> str:
    proxy, address = stage.proxy()
    stage.run(stage.read(address))
    proxy.silent = True
    stage.run_until_the_deadline(stage.read(address))
    left = bytes(stage.local.buffer)
    proxy.silent = False
    threading.Event().wait(0.2)
    assert stage.local.buffer == left
    stage.run(stage.read(address))
    stage.require_arrived()
    return "PeerLost at the deadline; nothing arrives later; a new connection after healing"


@fault("silent drop in the middle of a WRITE", "tcp", deadline_s=1)
def silent_write(stage: Stage) -> str:
    proxy, address = stage.proxy()
    stage.run(stage.write(address))
    proxy.hold = Trouble(Towards.TARGET, at=NBYTES + NBYTES // 2)
    stage.run_until_the_deadline(stage.write(address))
    proxy.hold = None  # whose place a slow sender has not reached
    proxy.silent = False
    stage.run(stage.write(address))
    stage.require_arrived()
    return "PeerLost at the deadline; the next WRITE fences the old connection and arrives"


@fault("half-open: the target's end is gone and nobody says so", "tcp", deadline_s=1)
def half_open(stage: Stage) -> str:
    proxy, address = stage.proxy()
    stage.run(stage.read(address))
    proxy.vanish()
    while not stage.count(Incident.BREAK):  # its time may be over before it is sent
        stage.run_until_the_deadline(stage.read(address))
    proxy.silent = False
    stage.run(stage.read(address))
    stage.require_arrived()
    return "PeerLost at the deadline (keepalive ends an idle connection within 20 s)"


# Peers and links that are slow.


@fault("slow reader: a target's host that takes bytes at 200 kB/s", "tcp", deadline_s=1)
def slow_reader(stage: Stage) -> str:
    proxy, address = stage.proxy()
    proxy.bytes_s = 200e3
    stage.run_until_the_deadline(stage.write(address))
    stage.far.close_window(stage.window_id)
    frozen = bytes(stage.memory.buffer)
    assert frozen != stage.content
    proxy.bytes_s = None
    threading.Event().wait(0.2)
    assert stage.memory.buffer == frozen
    return "PeerLost at the deadline; closing the window does not wait; nothing is stored after"


@fault("slow writer: a target that answers at 200 kB/s", "tcp", deadline_s=1)
def slow_writer(stage: Stage) -> str:
    proxy, address = stage.proxy()
    proxy.bytes_s = 200e3
    stage.run_until_the_deadline(stage.read(address))
    left = bytes(stage.local.buffer)
    proxy.bytes_s = None
    threading.Event().wait(0.2)
    assert stage.local.buffer == left
    return "PeerLost at the deadline; nothing arrives later"


@fault("slow reader: an initiator that asks for 4 MiB and takes nothing", "tcp", "shm")
def greedy_reader(stage: Stage) -> str:
    connection = stage.stranger()
    connection.send(request_of(Kind.READ, stage, rows=[(0, 0, NBYTES)]))
    stage.run(stage.read())
    stage.require_arrived()
    stage.far.close()  # it would wait for ever for the rest to be taken
    return "others are served; the engine closes at once"


@fault("slow writer: an initiator that stops in the middle of a frame", "tcp", "shm")
def stalled_writer(stage: Stage) -> str:
    connection = stage.stranger()
    connection.send(request_of(Kind.WRITE, stage, rows=[(0, 0, NBYTES)], nbytes=NBYTES))
    connection.send(bytes(100_000))
    stage.run(stage.read())
    stage.far.close_window(stage.window_id)  # it would wait for ever for the rest
    frozen = bytes(stage.memory.buffer)
    connection.send(bytes(NBYTES - 100_000))
    assert code_of_answer(connection) is Code.STALE
    assert stage.memory.buffer == frozen
    return "others are served; closing the window does not wait; the rest is refused as stale"


# Damage on the way.


@fault("a byte of a WRITE's payload is flipped on the wire", "tcp")
def flipped_write(stage: Stage) -> str:
    proxy, address = stage.proxy()
    proxy.flip = Trouble(Towards.TARGET, at=1 << 20)
    stage.run(stage.write(address))
    stage.require_arrived()
    assert stage.count(Incident.CORRUPT) == 1
    assert stage.count(Incident.RETRY) == 1
    return "noticed by the target, counted, the slice sent again; right bytes"


@fault("a byte of a READ's payload is flipped on the wire", "tcp")
def flipped_read(stage: Stage) -> str:
    proxy, address = stage.proxy()
    proxy.flip = Trouble(Towards.INITIATOR, at=1 << 20)
    stage.run(stage.read(address))
    stage.require_arrived()
    assert stage.count(Incident.CORRUPT) == 1
    return "noticed by the initiator, counted, the slice read again; right bytes"


@fault("a byte of a request's rows is flipped on the wire", "tcp")
def flipped_rows(stage: Stage) -> str:
    proxy, address = stage.proxy()
    stage.run(stage.read(address, 4096))  # the handshake and one request are behind us
    at = _HANDSHAKE_TO_TARGET + _READ_FRAME + HEADER_BYTES
    proxy.flip = Trouble(Towards.TARGET, at=at)
    stage.run(stage.read(address, 65536))
    stage.require_arrived()
    assert stage.count(Incident.BREAK) == 1
    return "the frame's seal does not fit: connection ended, read again; right bytes"


@fault("a byte of a reply's header is flipped on the wire", "tcp")
def flipped_reply(stage: Stage) -> str:
    for offset in range(HEADER_BYTES):
        proxy, address = stage.proxy()
        proxy.flip = Trouble(Towards.INITIATOR, at=_HANDSHAKE_TO_INITIATOR + offset)
        stage.run(stage.read(address, 65536))
        stage.require_arrived()
    return "each of its bytes: no frame, wrong size or wrong checksum; read again; right bytes"


@fault("a link that damages every slice", "tcp")
def always_flipped(stage: Stage) -> str:
    proxy, address = stage.proxy()
    stage.run(stage.read(address, 4096))
    at = _HANDSHAKE_TO_INITIATOR + 2 * HEADER_BYTES + 4096 + 100
    proxy.flip = Trouble(Towards.INITIATOR, at=at, times=3, every=HEADER_BYTES + 65536)
    stage.run(stage.read(address, 65536), error=IntegrityError)
    assert stage.count(Incident.CORRUPT) == 3
    return "IntegrityError after three attempts"
