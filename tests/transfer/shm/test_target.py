"""A peer that lies about what it offers stores nothing, and nothing it did stays behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import InvalidRequest
from tests.patience import PATIENCE_S
from tests.transfer.conftest import TOKEN
from tests.transfer.stage import authenticated, until_closed
from transfer import Segment, TransferEngine, TransferOptions, scatter
from transfer.native import address_of
from transfer.scatter import Rows
from transfer.shm.memfd import OwnedMemory
from transfer.tcp.connection import Connection
from transfer.tcp.frames import HEADER_BYTES, Code, Header, Kind, decode, encode, error_of, request

NBYTES = 8192


class Target:
    """An engine with a window over all of its memory, and a connection that speaks the protocol."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.segment: Segment = engine.allocate(NBYTES, readable=True)
        self.window_id = engine.open_window(self.segment, [(0, NBYTES)])
        self.connection: Connection = authenticated(engine.address)
        self.source = OwnedMemory(NBYTES)
        self.source.view[:] = b"s" * NBYTES

    def offer(self, fd: int | None, *, source_id: int = 1, nbytes: int = NBYTES, base: int = 0) -> None:
        header = Header(kind=Kind.OFFER, source_id=source_id, window_id=base, nbytes=nbytes)
        self.connection.send(encode(header), fd)

    def write(self, rows: Rows, *, source_id: int = 1) -> None:
        header = Header(
            kind=Kind.WRITE_FROM,
            entries=len(rows),
            segment_id=self.segment.segment_id,
            window_id=self.window_id,
            source_id=source_id,
        )
        self.connection.send(request(header, rows))
        reply = self.reply()
        if reply.code is not Code.OK:
            raise error_of(reply.code, self.connection.receive_bytes(reply.entries).decode())

    def reply(self) -> Header:
        return decode(self.connection.receive_bytes(HEADER_BYTES))


@pytest.fixture
def target() -> Iterator[Target]:
    options = TransferOptions(transports=("shm",))
    with TransferEngine(cluster_token=TOKEN, options=options) as engine:
        target = Target(engine)
        yield target
        target.connection.close()


def test_what_is_offered_is_stored_where_it_belongs(target: Target) -> None:
    target.offer(target.source.fd)
    target.write(scatter.rows((100, 0, 50), (200, 10, 1)))
    assert target.segment.buffer[100:150] == b"s" * 50
    assert target.segment.buffer[200] == ord("s")
    assert bytes(target.segment.buffer).count(b"s") == 51


@pytest.mark.parametrize("row", [(0, NBYTES, 1), (0, -1, 5), (0, 1, NBYTES), (0, 1 << 62, 1)])
def test_rows_outside_the_offered_memory_or_of_none_are_refused(target: Target, row: tuple[int, int, int]) -> None:
    target.offer(target.source.fd)
    with pytest.raises(InvalidRequest):
        target.write(scatter.rows(row))
    with pytest.raises(InvalidRequest, match="never offered"):
        target.write(scatter.rows((0, 0, 1)), source_id=77)
    assert not any(target.segment.buffer)
    target.write(scatter.rows((0, 0, 1)))


def test_an_offer_that_cannot_be_one_ends_the_connection(target: Target) -> None:
    fd, marker, loose = target.source.fd, OwnedMemory(1), os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 1 << 20)  # its owner could take it away
    for offers in (
        [{"fd": fd}, {"fd": fd}],
        [{"fd": None}],
        *([{"fd": fd, "nbytes": nbytes}] for nbytes in (0, NBYTES + 1, (1 << 64) - 1)),
        [{"fd": loose}],
        *([{"fd": marker.fd, "base": base}] for base in ((1 << 64) - 1, 1 << 63)),
    ):
        stranger = Target(target.engine)
        for offer in offers:
            stranger.offer(**offer)  # type: ignore[arg-type]
        until_closed(stranger.connection)
    os.close(loose)


def test_memory_offered_by_address_is_read_after_it_was_found_readable(target: Target) -> None:
    content, marker = bytearray(b"p" * NBYTES), OwnedMemory(1)
    target.offer(marker.fd, base=address_of(content))
    assert target.reply().nbytes == 1
    target.write(scatter.rows((0, 0, 10)))
    assert target.segment.buffer[:10] == b"p" * 10
    target.offer(marker.fd, base=1 << 46, source_id=2)
    assert target.reply().nbytes == 0
    with pytest.raises(InvalidRequest, match="never offered"):
        target.write(scatter.rows((0, 0, 10)), source_id=2)
    marker.retire()
    with pytest.raises(InvalidRequest, match="no longer registered"):
        target.write(scatter.rows((0, 0, 10)))


def test_descriptors_that_nobody_asked_for_are_closed(target: Target) -> None:
    target.offer(target.source.fd)
    target.write(scatter.rows((0, 0, 1)))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    header = encode(Header(kind=Kind.MAP, segment_id=999))
    for fd in [target.source.fd] * 5 + [None]:  # by the last one's answer the others are closed
        target.connection.send(header, fd)
        target.connection.receive_bytes(target.reply().entries)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_connection_mapped_goes_with_it(target: Target) -> None:
    target.offer(target.source.fd)
    target.write(scatter.rows((0, 0, 1)))
    gc.collect()  # what earlier tests have mapped is not counted
    maps = Path("/proc/self/maps").read_text().count("memfd:moonserve")
    [served] = target.engine._hosted.served._served.values()
    target.connection.close()
    assert served.ended.wait(PATIENCE_S)
    assert Path("/proc/self/maps").read_text().count("memfd:moonserve") == maps - 1
