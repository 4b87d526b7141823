"""The disk format decodes to the encoded values, the right record of an object counts, and the log tracks segments."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.kvstore.disk.base import PAGE, DiskObject, Pin
from moonserve.kvstore.disk.io import format as disk_format
from moonserve.kvstore.disk.io.format import PageContext, PageKind, Record, Tombstone
from moonserve.kvstore.disk.log_state import Segment, SegmentLog
from moonserve.kvstore.disk.recovery import RecordFilter
from moonserve.protocol.kv_blocks import BlockKey
from tests.kvstore.disk.tiers import written

HERE = PageContext(bytes(range(16)), 7, 11)
SEGMENT_PAGES = 64
NUM_SEGMENTS = 12

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


def encoded(record: Record) -> bytes:
    return disk_format.encode_record(record.object, record.page, record.source)


def header_of(record: Record, tag: bytes = bytes(16)) -> bytearray:
    """Returns a page with this header, written over other data."""
    page = bytearray(b"\xff" * PAGE)
    disk_format.fill_header(memoryview(page), HERE, encoded(record), tag)
    return page


@given(record=records, tag=st.binary(min_size=16, max_size=16))
def test_a_header_holds_all_metadata_of_its_object_and_is_valid_only_at_its_place(record: Record, tag: bytes) -> None:
    page = memoryview(header_of(record, tag))
    header = disk_format.decode_header(page, HERE)
    assert header is not None
    assert (header.kind, header.record, header.tag) == (PageKind.OBJECT, record, tag)
    assert disk_format.header_matches(page, HERE, record.object)
    for other in (HERE._replace(segment=8), HERE._replace(page=12), HERE._replace(folder_id=bytes(16))):
        assert disk_format.decode_header(page, other) is None
        assert not disk_format.header_matches(page, other, record.object)


@given(record=records, bit=st.integers(0, 8 * 200 - 1))
def test_a_flipped_bit_makes_a_header_invalid(record: Record, bit: int) -> None:
    damaged = header_of(record)
    end = len(damaged.rstrip(b"\0")) - 16  # the tag is all zeros
    damaged[bit // 8] ^= 1 << bit % 8
    if bit // 8 < end:
        assert disk_format.decode_header(memoryview(damaged), HERE) is None
        assert not disk_format.header_matches(memoryview(damaged), HERE, record.object)


@given(content=st.binary(max_size=PAGE))
def test_garbage_is_not_a_valid_header(content: bytes) -> None:
    page = memoryview(content.ljust(PAGE, b"\0"))
    assert disk_format.decode_header(page, HERE) is None
    assert disk_format.decode_trailer(page, HERE) is None


@given(several=st.lists(records, max_size=20))
def test_adjacent_records_are_decoded_separately(several: list[Record]) -> None:
    packed = b"".join(map(encoded, several))
    assert disk_format.decode_records(packed, len(several)) == several
    assert len(packed) == sum(disk_format.record_bytes(record.object) for record in several)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**disk_format.SEGMENT_BITS - 1), st.none() | st.sampled_from(Pin))
def test_a_page_holds_its_full_number_of_tombstones(generation: int, segment: int, pin: Pin | None) -> None:
    tombstones = [
        Tombstone(BlockKey(number.to_bytes(16, "little")), generation, segment, pin)
        for number in range(disk_format.TOMBSTONES_PER_PAGE)
    ]
    page = memoryview(bytearray(PAGE))
    disk_format.frame_page(page, PageKind.TOMBSTONES, HERE, disk_format.pack_tombstones(tombstones))
    header = disk_format.decode_header(page, HERE)
    assert header is not None
    assert list(disk_format.unpack_tombstones(header.tombstones)) == tombstones


def test_the_longest_tenant_fits_into_a_header() -> None:
    about = DiskObject(key=BlockKey(bytes(16)), parent=None, length=1, checksum=2, generation=3, tenant="t" * 1024)
    header = disk_format.decode_header(memoryview(header_of(Record(about, 1))), HERE)
    assert header is not None
    assert header.record == Record(about, 1)
    with pytest.raises(ValueError, match="at most 1024 bytes"):
        disk_format.encode_record(dataclasses.replace(about, tenant="t" * 1025), 1)


def test_nonces_differ_wherever_pages_do() -> None:
    nonces = {PageContext(bytes(16), s, p).nonce() for s in range(20) for p in range(20)}
    assert len(nonces) == 400
    assert {len(nonce) for nonce in nonces} == {12}


@pytest.mark.parametrize(
    ("forgotten", "records", "uncovered"),
    [  # (generation, segment) of tombstones; (generation, source, segment) of records, and whether they still count
        pytest.param([], {(1, 7, 9): True, (1, 3, 7): False, (1, 0, 3): False}, [], id="the latest record counts"),
        pytest.param([], {(1, 7, 9): True, (1, 0, 3): False}, [], id="segment 3 is not yet emptied and segment 7 gone"),
        pytest.param(
            [(1, 9)],
            {(3, 3, 9): True, (2, 0, 3): True, (1, 0, 3): False},
            [],
            id="another generation is another object",
        ),
        pytest.param(
            [(4, 7)], {(4, 0, 7): False, (4, 0, 8): True, (4, 8, 9): True}, [], id="written again to a later segment"
        ),
        # The copy needs a new tombstone: the old one goes with the copy's source.
        pytest.param([(4, 7)], {(4, 3, 8): False}, [(4, 8)], id="forgotten during its copy by compaction"),
    ],
)
def test_a_record_counts_unless_a_later_record_or_a_tombstone_overrides_it(
    forgotten: list[tuple[int, int]], records: dict[tuple[int, int, int], bool], uncovered: list[tuple[int, int]]
) -> None:
    known, key = RecordFilter(), written(1).object.key
    known.forget(disk_format.pack_tombstones([Tombstone(key, *each) for each in forgotten]))
    for (generation, source, segment), counts in records.items():
        record = Record(written(1, generation=generation).object, page=1, source=source)
        assert known.still_counts(record, segment) == counts
    assert known.uncovered == [Tombstone(key, *each) for each in uncovered]


def test_the_emptier_and_the_older_of_two_segments_goes_first() -> None:
    log = SegmentLog(NUM_SEGMENTS * SEGMENT_PAGES * PAGE, SEGMENT_PAGES * PAGE)
    for number, dead in ((1, 10), (2, 30), (3, 30)):
        segment = Segment(number, SEGMENT_PAGES)
        segment.add(1, 60 - dead, live=True)
        segment.add(61 - dead, dead, live=False)
        segment.footer = 2
        log.adopt(segment)
    victim = log.next_to_compact()
    assert victim is not None
    assert victim.number == 2


def test_a_tombstone_is_needed_as_long_as_a_segment_may_hold_what_it_forbids() -> None:
    log = SegmentLog(NUM_SEGMENTS * SEGMENT_PAGES * PAGE, SEGMENT_PAGES * PAGE)
    for number in (3, 5, 8):
        log.adopt(Segment(number, SEGMENT_PAGES))
    assert log.still_forbids(5, without=8)
    assert log.still_forbids(3, without=5)
    assert not log.still_forbids(3, without=3)
    assert not log.still_forbids(0, without=8)


def test_an_object_costs_a_few_bytes_of_memory() -> None:
    segment = Segment(1, 2**20)
    for number in range(50_000):
        segment.add(1 + 17 * number, 17, live=True)
    assert segment.nbytes / 50_000 < 6


def test_the_end_of_a_segment_counts_as_gain_only_if_its_objects_could_have_filled_it() -> None:
    segment = Segment(1, SEGMENT_PAGES, footer=2)
    segment.add(1, 40, live=True)
    assert segment.reclaimable_pages == 0
    segment = Segment(1, SEGMENT_PAGES, footer=2)
    segment.add(1, 4, live=True)
    assert segment.reclaimable_pages == segment.room
