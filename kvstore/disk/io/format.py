"""On-disk format of the SSD tier, byte by byte. Pure: bytes in, bytes out; knows no files.

A segment file consists of pages: its *head*; the log, where every object is a *header* page and its data, and every
group of tombstones (or of pin changes, encoded alike) is one header page; an *end mark* after the last group of writes;
and, once the segment is sealed, the *footer* (all records, then all tombstones, then the trailer in the last page).

Every metadata page has the same frame and names its folder, segment and page. Data of an earlier use of the file, or
data written to the wrong place, is therefore not taken for valid. Metadata is not encrypted, but it is authenticated
where the data is encrypted.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from moonserve.kvstore.disk.base import PAGE, DiskObject, Pin, Place
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, BlockKey

FORMAT_VERSION = 3
"""Format version of a folder."""
_PAGE_VERSION = 1
MAX_TENANT_BYTES = 1024
TAG_BYTES = 16
"""Bytes of an AES-GCM tag; all zero without encryption."""

_MAGIC = b"MSKVDSK" + bytes([_PAGE_VERSION])
_FRAME = struct.Struct("<8sQHBx")  # magic, checksum of the bytes after it, length of the payload, kind
_CHECKSUM_AT = 8
_CHECKED_FROM = 16
_CONTEXT = struct.Struct("<16sII")  # folder, segment, page
_FRAME_IN_PLACE = struct.Struct("<8sQHBx16sII")  # frame and context together
_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct("<8sQHBx16sIIIIIBBHQQ16s16s")  # frame, context and record together
_RECORD = struct.Struct("<IIIBBHQQ16s16s")
"""Page, length, source segment, pin, has a parent, tenant's length, checksum, generation, key, parent."""
_TOMBSTONE = struct.Struct("<16sQI")  # key, generation, segment and pin
_HEAD = struct.Struct("<I")
_TRAILER = struct.Struct("<IIIIQQ")

SEGMENT_BITS = 29
"""Bits of a segment number. The other bits of 32 mark a tombstone as a pin change and hold the pin."""
_IS_PIN = 1 << 31
TOMBSTONE_BYTES = _TOMBSTONE.size
TOMBSTONES_PER_PAGE = (PAGE - _FRAME.size - _CONTEXT.size) // TOMBSTONE_BYTES
MAX_RECORD_BYTES = _RECORD.size + MAX_TENANT_BYTES
LOG_BEGIN = 1
"""First page after the head."""

_ZEROS = memoryview(bytes(PAGE))
_PINS = (Pin.NONE, Pin.SOFT, Pin.HARD)
_PIN_CODES = {pin: code for code, pin in enumerate(_PINS)}


class PageKind(IntEnum):
    """Kind of a framed page."""

    HEAD = 1
    OBJECT = 2
    TOMBSTONES = 3
    END = 4
    TRAILER = 5


_KINDS = frozenset(map(int, PageKind))


class PageContext(NamedTuple):
    """Location that a page belongs to. A tuple for speed: each read or written object needs one."""

    folder_id: bytes
    segment: int
    page: int

    def nonce(self) -> bytes:
        """Nonce for AES-GCM under the folder's own key: each page of a segment is written as data at most once."""
        return struct.pack("<III", self.segment, self.page, 0)


@dataclass(frozen=True, slots=True)
class Record:
    """Record of an object in a segment's log."""

    object: DiskObject
    page: int
    source: int = 0
    """Segment that compaction copied the object from; 0 = written by the node."""

    @property
    def num_pages(self) -> int:
        return extent_pages(self.object.length)


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of a valid header page: an object, tombstones, or neither for an end mark or a head."""

    kind: PageKind
    record: Record | None = None
    sealed_with: bytes = b""
    """Bytes authenticated together with the encrypted data."""
    tag: bytes = bytes(TAG_BYTES)
    tombstones: bytes = b""


class Trailer(NamedTuple):
    """Sizes and checksums of a footer's sections."""

    log_end: int  # page
    num_records: int
    records_bytes: int
    tombstones_bytes: int
    records_checksum: int
    tombstones_checksum: int


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Marks `key` as forgotten, up to and including `generation` and `segment`. With a pin it forgets nothing: it
    records that pin for the object of `key`."""

    key: BlockKey
    generation: int
    segment: int = 0
    """0 = the segment that the tombstone is written to."""
    pin: Pin | None = None


def place_of(segment: int, page: int) -> Place:
    return Place(segment << 32 | page)


def segment_of(place: Place) -> int:
    return place >> 32


def page_of(place: Place) -> int:
    return place & 0xFFFFFFFF


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE)


def extent_pages(length: int) -> int:
    """Returns the pages of an object's header and data."""
    return 1 + pages(length)


def footer_pages(records_bytes: int, tombstones_bytes: int) -> int:
    # `pages` of both, inlined because each append calls this
    return 1 - -records_bytes // PAGE - -tombstones_bytes // PAGE


def frame_page(page: memoryview, kind: PageKind, context: PageContext, *body: bytes) -> None:
    """Frames a page in place and zeroes the rest: three times as fast as building bytes first."""
    end = _FRAME_IN_PLACE.size
    for part in body:
        begin, end = end, end + len(part)
        page[begin:end] = part
    _FRAME_IN_PLACE.pack_into(page, 0, _MAGIC, 0, end - _FRAME.size, kind, *context)
    page[end:] = _ZEROS[end:]
    _CHECKSUM.pack_into(page, _CHECKSUM_AT, xxh3_64_intdigest(page[_CHECKED_FROM:end]))


def frame_head(folder_id: bytes, segment: int) -> bytes:
    """Returns the frame of a segment's pages, without what differs between them, for disk_layout.c."""
    return _FRAME_IN_PLACE.pack(_MAGIC, 0, 0, 0, folder_id, segment, 0)


def unframe(page: memoryview, context: PageContext) -> tuple[PageKind, bytes] | None:
    """Returns kind and body of a valid page that belongs at `context`, else None."""
    found = _unframe_any(page)
    if found is None or found[1] != context:
        return None
    return found[0], found[2]


def context_of(page: memoryview) -> PageContext | None:
    """Returns the location that a valid page belongs to, else None."""
    found = _unframe_any(page)
    return found and found[1]


def _unframe_any(page: memoryview) -> tuple[PageKind, PageContext, bytes] | None:
    if len(page) < PAGE:
        return None
    magic, checksum, length, kind = _FRAME.unpack_from(page)
    end = _FRAME.size + length
    if magic != _MAGIC or end > PAGE or length < _CONTEXT.size:
        return None
    checked = bytes(page[_CHECKED_FROM:end])
    if xxh3_64_intdigest(checked) != checksum or kind not in _KINDS:
        return None
    payload = checked[_FRAME.size - _CHECKED_FROM :]
    return PageKind(kind), PageContext(*_CONTEXT.unpack_from(payload)), payload[_CONTEXT.size :]


def fill_head(page: memoryview, context: PageContext, num_pages: int, cipher: str) -> None:
    """Writes the first page of a segment of `num_pages`. The cipher's name is only for people who inspect the file."""
    frame_page(page, PageKind.HEAD, context, _HEAD.pack(num_pages), cipher.encode())


def decode_head(page: memoryview, context: PageContext) -> int | None:
    """Returns the number of pages of the segment, or None for an invalid head."""
    framed = unframe(page, context)
    if framed is None or framed[0] is not PageKind.HEAD:
        return None
    num_pages: int = _HEAD.unpack_from(framed[1])[0]
    return num_pages


def record_bytes(about: DiskObject) -> int:
    """Returns the length of the object's record."""
    return _RECORD.size + (len(about.tenant.encode()) if about.tenant else 0)


def encode_record(about: DiskObject, page: int, source: int = 0) -> bytes:
    """Returns the encoded `Record`. Raises ValueError for a tenant name that is too long."""
    tenant = about.tenant.encode()
    if len(tenant) > MAX_TENANT_BYTES or len(about.key) != KEY_BYTES:
        raise ValueError(f"a tenant's name has at most {MAX_TENANT_BYTES} bytes, a key {KEY_BYTES}")
    fixed = _RECORD.pack(
        page,
        about.length,
        source,
        _PIN_CODES[about.pin],
        about.parent is not None,
        len(tenant),
        about.checksum,
        about.generation,
        about.key,
        about.parent or NO_PARENT,
    )
    return fixed + tenant


def decode_records(packed: bytes, count: int) -> list[Record]:
    """Decodes records, back to back, whose checksum was verified."""
    records, offset = [], 0
    for _ in range(count):
        record, offset = _decode_record(packed, offset)
        records.append(record)
    return records


def _decode_record(packed: bytes, offset: int) -> tuple[Record, int]:
    page, length, source, pin, has_parent, tenant_bytes, checksum, generation, key, parent = _RECORD.unpack_from(
        packed, offset
    )
    begin = offset + _RECORD.size
    end = begin + tenant_bytes
    about = DiskObject(
        key=BlockKey(key),
        parent=BlockKey(parent) if has_parent else None,
        length=length,
        checksum=checksum,
        generation=generation,
        tenant=packed[begin:end].decode(),
        pin=_PINS[pin],
    )
    return Record(about, page, source), end


def sealed_with(context: PageContext, encoded_record: bytes) -> bytes:
    """Returns the bytes that AES-GCM authenticates together with an object's data."""
    return _CONTEXT.pack(context.folder_id, context.segment, context.page) + encoded_record


def fill_header(page: memoryview, context: PageContext, encoded_record: bytes, tag: bytes = bytes(TAG_BYTES)) -> None:
    frame_page(page, PageKind.OBJECT, context, encoded_record, tag)


def decode_header(page: memoryview, context: PageContext) -> Header | None:
    """Decodes a header page. Returns None for a page that does not belong at `context`."""
    framed = unframe(page, context)
    if framed is None:
        return None
    kind, body = framed
    if kind is PageKind.TOMBSTONES:
        return Header(kind, tombstones=body)
    if kind is not PageKind.OBJECT:
        return Header(kind)
    encoded, tag = body[:-TAG_BYTES], body[-TAG_BYTES:]
    record, _ = _decode_record(encoded, 0)
    return Header(kind, record, sealed_with(context, encoded), tag)


def header_matches(page: memoryview, context: PageContext, about: DiskObject) -> bool:
    """True if the page is the header of the given object: four times as fast as `decode_header`."""
    found = _HEADER.unpack_from(page)
    wanted = about.length, about.checksum, about.generation, about.key
    if (found[0], found[3], *found[4:7]) != (_MAGIC, PageKind.OBJECT, *context):
        return False
    checked = page[_CHECKED_FROM : _FRAME.size + found[2]]
    return (found[8], *found[13:16]) == wanted and xxh3_64_intdigest(checked) == found[1]


def pack_tombstones(tombstones: Sequence[Tombstone]) -> bytes:
    return b"".join(_TOMBSTONE.pack(t.key, t.generation, t.segment | _pin_bits(t.pin)) for t in tombstones)


def _pin_bits(pin: Pin | None) -> int:
    return 0 if pin is None else _IS_PIN | _PIN_CODES[pin] << SEGMENT_BITS


def unpack_tombstones(packed: bytes) -> Iterator[Tombstone]:
    for key, generation, last in _TOMBSTONE.iter_unpack(packed):
        pin = _PINS[last >> SEGMENT_BITS & 3] if last & _IS_PIN else None
        yield Tombstone(BlockKey(key), generation, last & (1 << SEGMENT_BITS) - 1, pin)


def encode_footer(context: PageContext, *, log_end: int, num_records: int, records: bytes, tombstones: bytes) -> bytes:
    """Returns the footer as whole pages, which end at the segment's last page; `context` is that of the last page."""
    trailer = Trailer(
        log_end,
        num_records,
        len(records),
        len(tombstones),
        xxh3_64_intdigest(records),
        xxh3_64_intdigest(tombstones),
    )
    last = bytearray(PAGE)
    frame_page(memoryview(last), PageKind.TRAILER, context, _TRAILER.pack(*trailer))
    sections = (records, tombstones, last)
    return b"".join(section.ljust(pages(len(section)) * PAGE, b"\0") for section in sections)


def decode_trailer(page: memoryview, context: PageContext) -> Trailer | None:
    framed = unframe(page, context)
    return None if framed is None or framed[0] is not PageKind.TRAILER else Trailer(*_TRAILER.unpack(framed[1]))
