"""Headers and footers: what goes in comes out, and nothing else does."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.disk import format as disk_format
from kvstore.disk.base import PAGE, DiskObject, Pin
from kvstore.disk.format import Context, Kind, Record, Tombstone
from protocol.keys import BlockKey

HERE = Context(bytes(range(16)), 7, 11)

keys = st.binary(min_size=16, max_size=16).map(BlockKey)
objects = st.builds(
    DiskObject,
    key=keys,
    parent=st.none() | keys,
    length=st.integers(0, 2**32 - 1),
    checksum=st.integers(0, 2**64 - 1),
    generation=st.integers(0, 2**64 - 1),
    tenant=st.text(max_size=100),
    pin=st.sampled_from(Pin),
)
records = st.builds(Record, objects, st.integers(1, 2**31), st.integers(0, 2**31))


def page(content: bytes) -> memoryview:
    return memoryview(content.ljust(PAGE, b"\0"))


def header_of(record: Record, tag: bytes = bytes(16)) -> bytearray:
    """A page in which something else was before."""
    written = bytearray(b"\xff" * PAGE)
    disk_format.fill_header(memoryview(written), HERE, disk_format.encode_record(record), tag)
    return written


@given(record=records, tag=st.binary(min_size=16, max_size=16))
def test_a_header_says_everything_about_its_object(record: Record, tag: bytes) -> None:
    written = memoryview(header_of(record, tag))
    header = disk_format.decode_header(written, HERE)
    assert header is not None
    assert (header.kind, header.record, header.tag) == (Kind.OBJECT, record, tag)
    assert disk_format.holds(written, HERE, record.object)


@given(record=records, bit=st.integers(0, 8 * 200 - 1))
def test_a_flipped_bit_makes_a_header_invalid(record: Record, bit: int) -> None:
    damaged = header_of(record)
    end = len(damaged.rstrip(b"\0")) - 16  # the tag is zeros
    damaged[bit // 8] ^= 1 << bit % 8
    if bit // 8 < end:
        assert disk_format.decode_header(memoryview(damaged), HERE) is None
        assert not disk_format.holds(memoryview(damaged), HERE, record.object)


@given(record=records)
def test_a_header_counts_only_where_it_belongs(record: Record) -> None:
    written = memoryview(header_of(record))
    for other in (HERE._replace(segment=8), HERE._replace(page=12), HERE._replace(folder_id=bytes(16))):
        assert disk_format.decode_header(written, other) is None
        assert not disk_format.holds(written, other, record.object)


@given(content=st.binary(max_size=PAGE))
def test_garbage_is_no_header(content: bytes) -> None:
    assert disk_format.decode_header(page(content), HERE) is None
    assert disk_format.decode_trailer(page(content), HERE) is None


@given(several=st.lists(records, max_size=20))
def test_records_back_to_back_come_apart_again(several: list[Record]) -> None:
    packed = b"".join(map(disk_format.encode_record, several))
    assert disk_format.decode_records(packed, len(several)) == several
    assert len(packed) == sum(disk_format.record_bytes(record.object) for record in several)


def test_a_page_holds_its_full_number_of_tombstones() -> None:
    tombstones = [
        Tombstone(BlockKey(number.to_bytes(16, "little")), number, 3)
        for number in range(disk_format.TOMBSTONES_PER_PAGE)
    ]
    written = memoryview(bytearray(PAGE))
    disk_format.fill(written, Kind.TOMBSTONES, HERE, disk_format.pack_tombstones(tombstones))
    header = disk_format.decode_header(written, HERE)
    assert header is not None
    assert list(disk_format.unpack_tombstones(header.tombstones)) == tombstones


def test_the_longest_tenant_fits_into_a_header() -> None:
    about = DiskObject(key=BlockKey(bytes(16)), parent=None, length=1, checksum=2, generation=3, tenant="t" * 1024)
    header = disk_format.decode_header(memoryview(header_of(Record(about, 1))), HERE)
    assert header is not None
    assert header.record == Record(about, 1)
    with pytest.raises(ValueError, match="at most 1024 bytes"):
        disk_format.encode_record(Record(dataclasses.replace(about, tenant="t" * 1025), 1))


def test_nonces_differ_wherever_pages_do() -> None:
    nonces = {Context(bytes(16), s, p).nonce() for s in range(20) for p in range(20)}
    assert len(nonces) == 400
    assert {len(nonce) for nonce in nonces} == {12}
