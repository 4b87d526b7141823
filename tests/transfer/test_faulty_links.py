"""Links and peers that reset, fall silent, are slow or damage bytes. Each batch succeeds, or is lost at its deadline.

docs/transfer-faults.md lists the faults.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from moonserve.protocol.errors import IntegrityError, MoonserveError, PeerLost
from moonserve.transfer import Op
from moonserve.transfer.memory.data_plane import SEAL_BYTES
from moonserve.transfer.paths.traffic_stats import Incident
from moonserve.transfer.tcp import handshake
from moonserve.transfer.tcp.frames import HEADER_BYTES, Code, Kind
from tests.patience import NEVER_S, PATIENCE_S
from tests.thoroughness import examples
from tests.transfer.conftest import Make, PeerInProcess, run
from tests.transfer.fuzz.mutations import mutated
from tests.transfer.proxy import LinkFault, Proxy, Towards
from tests.transfer.stage import NBYTES, Stage, WritesTo, code_of_answer, request_of

TRANSPORTS = ["tcp"]

HANDSHAKE_TO_TARGET = handshake._HELLO.size + handshake._PROOF.size
HANDSHAKE_TO_INITIATOR = handshake._CHALLENGE.size + handshake._WELCOME.size
READ_FRAME = HEADER_BYTES + 24 + 8
CARRIED = {Op.WRITE: Towards.TARGET, Op.READ: Towards.INITIATOR}
"""Direction in which the bytes of an operation travel."""

both_ways = pytest.mark.parametrize("op", list(Op))
near_and_far = pytest.mark.parametrize("transport", ["tcp", "shm"])


# Connections that end


@both_ways
@pytest.mark.parametrize("fault", ["reset", "flip"])
def test_slices_that_a_reset_cuts_off_or_with_a_flipped_byte_are_sent_again(stage: Stage, op: Op, fault: str) -> None:
    """For a WRITE, the first connection is fenced before. A flipped byte is detected and counted."""
    proxy, address = stage.proxy()
    setattr(proxy, fault, LinkFault(CARRIED[op], at=1 << 20))
    stage.run(stage.transfer(op, address))
    stage.require_arrived()
    assert stage.count(Incident.RETRY) > 0
    if fault == "flip":
        assert stage.count(Incident.CORRUPT) == stage.count(Incident.RETRY) == 1


def test_a_batch_fails_after_two_reset_connections(stage: Stage) -> None:
    proxy, address = stage.proxy()
    proxy.reset = LinkFault(Towards.INITIATOR, at=300_000, times=1000)
    stage.run(stage.transfer(Op.READ, address), error=PeerLost, deadline_s=NEVER_S)
    assert proxy.num_connections == 2


@near_and_far
def test_a_killed_target_is_lost_at_once(make_engine: Make, peer: PeerInProcess) -> None:
    """Over shm its memory is still mapped."""
    to = WritesTo(make_engine(), peer)
    run(to.engine, to.transfer, to.read)
    peer.stop()  # so that the batch is certainly in flight
    batch = to.engine.submit([to.transfer], deadline_s=NEVER_S)
    peer.process.kill()
    with pytest.raises(PeerLost):
        batch.wait()
    for each in (to.read, to.transfer):
        with pytest.raises(PeerLost):
            run(to.engine, each, deadline_s=NEVER_S)


# Peers and links that fall silent


@pytest.mark.parametrize("transport", ["shm", "tcp", pytest.param("tls", marks=pytest.mark.slow)])
def test_a_stopped_peer_fails_each_batch_at_its_own_deadline(make_engine: Make, peer: PeerInProcess) -> None:
    """Over tcp the other batches wait behind the first one. Over shm they are in flight at the same time."""
    to = WritesTo(make_engine(max_in_flight_bytes=1), peer)
    run(to.engine, to.transfer)
    peer.stop()
    begin = time.monotonic()
    patient = to.engine.submit([to.transfer], deadline_s=NEVER_S)
    batches = [to.engine.submit([to.transfer], deadline_s=each) for each in (0.6, 0.1)]
    for batch, deadline_s in zip(reversed(batches), (0.1, 0.6), strict=True):
        with pytest.raises(PeerLost):
            batch.wait(PATIENCE_S)
        assert time.monotonic() - begin >= deadline_s
    assert not patient.done
    peer.resume()
    patient.wait(PATIENCE_S)
    run(to.engine, to.transfer)


def slow_down(proxy: Proxy) -> None:
    proxy.bytes_s = 200e3


@pytest.mark.parametrize("harm", [Proxy.silence, slow_down])
def test_a_read_stores_nothing_after_its_deadline(stage: Stage, harm: Callable[[Proxy], None]) -> None:
    proxy, address = stage.proxy()
    stage.run(stage.transfer(Op.READ, address))
    harm(proxy)
    read, other = stage.transfer(Op.READ, address), stage.near.allocate(NBYTES)
    stage.run_until_the_deadline(read)
    left = bytes(stage.local.buffer)
    proxy.silent, proxy.bytes_s = False, None
    stage.run(replace(read, local=other))
    assert other.buffer == stage.content
    assert stage.local.buffer == left


def test_a_write_fences_the_connection_of_an_earlier_silent_one(stage: Stage) -> None:
    proxy, address = stage.proxy()
    stage.run(stage.transfer(Op.WRITE, address))
    proxy.hold = LinkFault(Towards.TARGET, at=NBYTES + NBYTES // 2)
    stage.run_until_the_deadline(stage.transfer(Op.WRITE, address))
    proxy.hold = None  # a slow sender may not have reached its position
    proxy.silent = False
    stage.run(stage.transfer(Op.WRITE, address))
    stage.require_arrived()


def test_a_half_open_connection_ends_at_the_deadline(stage: Stage) -> None:
    """The target's end is gone, and the initiator is not notified."""
    proxy, address = stage.proxy()
    stage.run(stage.transfer(Op.READ, address))
    proxy.vanish()
    while not stage.count(Incident.BREAK):  # a batch may reach its deadline before it is sent
        stage.run_until_the_deadline(stage.transfer(Op.READ, address))
    proxy.silent = False
    stage.run(stage.transfer(Op.READ, address))
    stage.require_arrived()


# Peers that are slow


def test_closing_a_window_does_not_wait_for_a_slow_writer_and_nothing_is_stored_later(stage: Stage) -> None:
    proxy, address = stage.proxy()
    slow_down(proxy)
    stage.run_until_the_deadline(stage.transfer(Op.WRITE, address))
    stage.far.close_window(stage.window_id)
    frozen = bytes(stage.memory.buffer)
    assert frozen != stage.content
    proxy.bytes_s = None
    stage.run(stage.transfer(Op.READ, address))  # by now the slow link has delivered everything
    assert stage.memory.buffer == frozen


@near_and_far
def test_an_initiator_that_reads_no_replies_blocks_no_other(stage: Stage) -> None:
    connection = stage.stranger()
    connection.send(request_of(Kind.READ, stage, rows=[(0, 0, NBYTES)]))
    stage.run(stage.transfer(Op.READ))
    stage.require_arrived()
    stage.far.close()  # would hang if it waited for the rest to be read


@near_and_far
def test_an_initiator_that_stops_inside_a_frame_blocks_no_other_and_its_rest_is_stale(stage: Stage) -> None:
    connection = stage.stranger()
    connection.send(request_of(Kind.WRITE, stage, rows=[(0, 0, NBYTES)], nbytes=NBYTES))
    connection.send(bytes(100_000))
    stage.run(stage.transfer(Op.READ))
    stage.far.close_window(stage.window_id)  # would hang if it waited for the rest
    frozen = bytes(stage.memory.buffer)
    connection.send(bytes(NBYTES - 100_000 + SEAL_BYTES))
    assert code_of_answer(connection) is Code.STALE
    assert stage.memory.buffer == frozen


# Damaged bytes


def test_a_request_with_a_flipped_byte_in_its_rows_ends_the_connection(stage: Stage) -> None:
    proxy, address = stage.proxy()
    stage.run(stage.transfer(Op.READ, address, 4096))  # passes the handshake and one request
    at = HANDSHAKE_TO_TARGET + READ_FRAME + HEADER_BYTES
    proxy.flip = LinkFault(Towards.TARGET, at=at)
    stage.run(stage.transfer(Op.READ, address, 65536))
    stage.require_arrived()
    assert stage.count(Incident.BREAK) == 1


def test_a_flipped_byte_in_a_reply_header_is_detected(stage: Stage) -> None:
    for offset in range(HEADER_BYTES):
        proxy, address = stage.proxy()
        proxy.flip = LinkFault(Towards.INITIATOR, at=HANDSHAKE_TO_INITIATOR + offset)
        stage.run(stage.transfer(Op.READ, address, 65536))
        stage.require_arrived()


def test_a_slice_fails_after_three_corrupt_attempts(stage: Stage) -> None:
    proxy, address = stage.proxy()
    stage.run(stage.transfer(Op.READ, address, 4096))
    at = HANDSHAKE_TO_INITIATOR + 2 * HEADER_BYTES + 4096 + SEAL_BYTES + 100
    proxy.flip = LinkFault(Towards.INITIATOR, at=at, times=3, every=HEADER_BYTES + 65536 + SEAL_BYTES)
    stage.run(stage.transfer(Op.READ, address, 65536), error=IntegrityError)
    assert stage.count(Incident.CORRUPT) == 3


@pytest.mark.slow
def test_mutated_replies_give_no_wrong_success_and_touch_no_other_memory(stage: Stage) -> None:
    proxy, address = stage.proxy()
    rng, chance = random.Random(5), random.Random(6)

    def mangle(data: bytearray) -> bytearray:
        return bytearray(mutated(rng, data)) if rng.random() < 0.3 else data

    proxy.mangle = mangle
    for _ in range(examples(150)):
        read = stage.transfer(Op.READ, address, chance.randrange(1, 65536))
        batch = stage.near.submit([read], deadline_s=0.2)
        with suppress(MoonserveError):
            batch.wait(PATIENCE_S)
        assert batch.done
        if batch.errors == (None,):
            assert stage.local.buffer[: read.length] == stage.content[: read.length]
        if chance.random() < 0.1:
            with suppress(MoonserveError):
                stage.near.open(address, deadline_s=0.2)
