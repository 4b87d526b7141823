"""The engine's own surface: opening a peer, viewing, scatter lists, synchronous runs, cancelling, callbacks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import random
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from protocol.errors import Cancelled, InvalidRequest, PeerLost
from tests.patience import PATIENCE_S
from tests.transfer.conftest import Pair, PeerInProcess
from transfer import Batch, Op, RemoteSegment, ScatterTransfer, Transfer, TransferEngine


def test_opening_a_peer_lists_what_it_lets_others_read(pair: Pair) -> None:
    named = pair.far.allocate(4096, readable=True, name="kv")
    pair.far.allocate(4096)  # not readable: nobody's business
    opened = pair.near.open(pair.far.address)
    infos = {segment.segment_id: segment.info for segment in opened}
    assert set(infos) == {pair.memory.segment_id, named.segment_id}
    info = infos[named.segment_id]
    assert info is not None
    assert (info.name, info.nbytes, info.location) == ("kv", 4096, "cpu:0")
    assert pair.remote in opened


def test_opening_a_peer_that_is_gone_says_so(pair: Pair) -> None:
    pair.far.close()
    with pytest.raises(PeerLost):
        pair.near.open(pair.far.address, deadline_s=PATIENCE_S)


def test_opening_a_peer_without_a_descriptor_left_loses_it_for_now(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as exhausted:
        exhausted.setattr(socket, "socket", refuse)
        with pytest.raises(PeerLost, match="open files"):
            pair.near.open(pair.far.address, deadline_s=PATIENCE_S)
    assert pair.near.open(pair.far.address, deadline_s=PATIENCE_S)


def test_run_moves_bytes_both_ways_in_the_callers_thread(pair: Pair) -> None:
    pair.run(pair.read(0, 0, 10))  # connects
    for length in (1, 4096, 300_000):
        content = random.Random(length).randbytes(length)
        pair.local.buffer[:length] = content
        pair.near.run([pair.write(0, 1000, length)], deadline_s=PATIENCE_S)
        pair.near.run([pair.read(500_000, 1000, length)], deadline_s=PATIENCE_S)
        assert pair.local.buffer[500_000 : 500_000 + length] == content


@pytest.mark.parametrize("length", [64, 400_000])
def test_run_raises_what_the_peer_refuses_with(pair: Pair, length: int) -> None:
    pair.run(pair.read(0, 0, 10))
    beyond = pair.memory.nbytes - 10
    with pytest.raises(InvalidRequest):
        pair.near.run([pair.read(0, beyond, length)], deadline_s=PATIENCE_S)
    with pytest.raises(InvalidRequest):
        pair.near.run([pair.read(pair.local.nbytes - 10, 0, length)], deadline_s=PATIENCE_S)
    pair.near.run([pair.read(0, 0, length)], deadline_s=PATIENCE_S)


def test_a_scatter_list_is_one_transfer_with_many_places(pair: Pair) -> None:
    rng = random.Random(4)
    count, size = 6000, 100
    places = rng.sample(range(10_000), count)
    rows = np.array([(place * size, i * size, size) for i, place in enumerate(places)])
    pair.near.run([ScatterTransfer(Op.READ, pair.local, pair.remote, rows)], deadline_s=PATIENCE_S)
    for i, place in enumerate(places):
        assert pair.local.buffer[i * size :][:size] == pair.memory.buffer[place * size :][:size]

    pair.local.buffer[:] = rng.randbytes(pair.local.nbytes)
    write = ScatterTransfer(Op.WRITE, pair.local, pair.remote, rows, pair.window_id)
    pair.near.run([write], deadline_s=PATIENCE_S)
    for i, place in enumerate(places):
        assert pair.local.buffer[i * size :][:size] == pair.memory.buffer[place * size :][:size]


def test_a_scatter_list_that_is_wrong_fails_alone(pair: Pair) -> None:
    def read(*rows: tuple[int, int, int]) -> ScatterTransfer:
        return ScatterTransfer(Op.READ, pair.local, pair.remote, np.array(rows, np.int64))

    flat = ScatterTransfer(Op.READ, pair.local, pair.remote, np.zeros(3, np.int64))
    end = pair.local.nbytes
    batch = pair.near.submit(
        [read((0, end - 5, 6)), read((-1, 0, 5)), flat, read((0, 0, 5), (9, 9, 0))],
        deadline_s=PATIENCE_S,
    )
    with pytest.raises(InvalidRequest):
        batch.wait(PATIENCE_S)
    kinds = [type(error) for error in batch.errors]
    assert kinds == [InvalidRequest, InvalidRequest, InvalidRequest, type(None)]


def test_tensors_arrays_and_mappings_can_be_registered(pair: Pair) -> None:
    tensor = torch.zeros(64, dtype=torch.bfloat16)
    array = np.zeros((8, 16), np.int8)
    with mmap.mmap(-1, 4096) as mapping:
        for buffer in (tensor, array, mapping):
            segment = pair.near.register(buffer)
            pair.run(Transfer(Op.READ, segment, 0, pair.remote, 5, 64))
            assert segment.buffer[:64] == pair.memory.buffer[5:69]
            pair.near.deregister(segment)
            del segment
    assert bytes(tensor.view(torch.uint8).tolist()[:64]) == bytes(pair.memory.buffer[5:69])


def test_tensors_that_have_no_plain_memory_are_refused(pair: Pair) -> None:
    for tensor in (torch.zeros(4, 4).T[:, 1:], torch.zeros(0), torch.zeros(4, device="meta")):
        with pytest.raises(InvalidRequest):
            pair.near.register(tensor)


def test_a_cancelled_batch_ends_and_frees_its_memory(
    make_engine: Callable[..., TransferEngine], peer: PeerInProcess
) -> None:
    engine = make_engine()
    nbytes = 64 << 20
    address = peer.ask("address")
    segment_id = peer.ask("allocate", nbytes, 3, True)
    window_id = peer.ask("open_window", segment_id, [(0, nbytes)])
    local = engine.allocate(nbytes)
    remote = RemoteSegment(address, segment_id)
    write = Transfer(Op.WRITE, local, 0, remote, 0, nbytes, window_id)
    engine.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    peer.stop()
    first = engine.submit([write], deadline_s=PATIENCE_S)
    second = engine.submit([write], deadline_s=PATIENCE_S)
    for batch in (first, second):
        batch.cancel()
    peer.resume()
    with pytest.raises(Cancelled):
        second.wait(PATIENCE_S)
    with contextlib.suppress(Cancelled):  # may have been under way as a whole
        first.wait(PATIENCE_S)
    engine.deregister(local)


def test_callbacks_hear_of_the_end_once_and_a_failing_one_harms_nobody(pair: Pair) -> None:
    heard: list[Batch] = []
    both = threading.Event()

    def fail(batch: Batch) -> None:
        raise RuntimeError("a bug of the caller's")

    batch = pair.near.submit([pair.read(0, 0, 500_000)], deadline_s=PATIENCE_S)
    batch.add_done_callback(fail) if not batch.done else None
    batch.add_done_callback(heard.append)
    batch.add_done_callback(lambda _: both.set())
    assert both.wait(PATIENCE_S)
    batch.wait(PATIENCE_S)
    assert heard == [batch]
    batch.add_done_callback(heard.append)
    assert heard == [batch, batch]


async def test_batches_can_be_awaited_together(pair: Pair) -> None:
    batches = [
        pair.near.submit([pair.read(i * 1000, i * 1000, 1000)], deadline_s=PATIENCE_S)
        for i in range(50)
    ]
    await asyncio.gather(*batches)
    assert pair.local.buffer[:50_000] == pair.memory.buffer[:50_000]


@pytest.mark.parametrize("transport", ["shm"])
def test_a_view_reads_the_peers_memory_in_place(pair: Pair) -> None:
    with pair.near.view(pair.remote, 100, 50) as view:
        assert view == pair.memory.buffer[100:150]
        assert view.readonly
        pair.memory.buffer[100] ^= 0xFF
        assert view[0] == pair.memory.buffer[100]
    with pytest.raises(InvalidRequest), pair.near.view(pair.remote, pair.memory.nbytes - 5, 6):
        pytest.fail("viewed beyond the end")


@pytest.mark.parametrize("transport", ["tcp"])
def test_memory_of_another_host_cannot_be_viewed(pair: Pair) -> None:
    with pytest.raises(InvalidRequest), pair.near.view(pair.remote, 0, 10):
        pytest.fail("viewed over tcp")
