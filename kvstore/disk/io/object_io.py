"""Reads and writes runs of adjacent objects in a segment file. Blocking; for I/O threads.

An object counts as read only if the right header is at the right place and the bytes match their checksum. Knows
neither which objects are live nor who reads them.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from moonserve.kvstore.disk.base import PAGE, DiskRead
from moonserve.kvstore.disk.io.buffers import MAX_COPIED_PAGES, AlignedScratch, OutOfPages, RingPages, in_place
from moonserve.kvstore.disk.io.encryption import AesGcm
from moonserve.kvstore.disk.io.folder import Folder
from moonserve.kvstore.disk.io.format import (
    Header,
    PageContext,
    PageKind,
    decode_header,
    extent_pages,
    fill_header,
    frame_head,
    frame_page,
    header_matches,
    page_of,
    sealed_with,
    segment_of,
)
from moonserve.kvstore.disk.io.segment_file import SegmentFile
from moonserve.kvstore.disk.io.uring import IoRun
from moonserve.protocol.process.native_libraries import C_FLAGS, load_library, shared_cache
from moonserve.transfer.memory.data_plane import address_of

_ENTRY = struct.Struct("<QQIHH")
"""`Entry` of disk_layout.c."""


class LogEntry(NamedTuple):
    """Content to write at a page. An end mark says that the log is whole up to it; the next run overwrites it."""

    page: int
    num_pages: int
    kind: PageKind  # OBJECT, TOMBSTONES or END
    encoded: bytes = b""  # the record, or the tombstones
    memory: memoryview = memoryview(b"")  # data of an object


@functools.cache
def _lay_out() -> Callable[..., int]:
    """Returns `lay_out` of disk_layout.c, without declared types: they would double the time of a call."""
    library = load_library(Path(__file__).parents[2] / "native" / "disk_layout.c", C_FLAGS, shared_cache())
    return library.lay_out


TakePages = Callable[[int], list[memoryview]]
"""Returns this many pages for disk transfers, in one piece or several, not cleared."""


def pages_from(scratch: memoryview) -> TakePages:
    """Returns a function that takes pages consecutively from scratch memory."""
    end = 0

    def take(num_pages: int) -> list[memoryview]:
        nonlocal end
        begin, end = end, end + num_pages * PAGE
        return [scratch[begin:end]]

    return take


class ObjectBuffers(NamedTuple):
    """Buffers that receive an object: its header, and the data not read directly into the caller's memory."""

    read: DiskRead
    header: memoryview
    direct: int
    """Bytes read directly into the caller's memory."""
    rest: Sequence[memoryview]


class RunBuffers(NamedTuple):
    """Buffers that receive a run of adjacent objects."""

    arrivals: Sequence[ObjectBuffers]
    buffers: Sequence[memoryview]
    segment: int
    page: int
    num_pages: int


class ObjectIo:
    """Reads and writes runs of one folder."""

    def __init__(self, folder: Folder, scratch: AlignedScratch) -> None:
        self._folder = folder
        self._cipher: AesGcm | None = folder.cipher
        self._scratch = scratch
        self._lay_out = _lay_out()

    def write(self, file: SegmentFile, entries: Sequence[LogEntry]) -> None:
        """Writes adjacent entries, in order. Raises OSError."""
        with self._scratch.borrow(sum(entry.num_pages for entry in entries) * PAGE) as scratch:
            file.write(entries[0].page, self.encode_run(file.number, entries, pages_from(scratch)))

    def encode_run(self, segment: int, entries: Sequence[LogEntry], take: TakePages) -> list[memoryview]:
        """Returns the on-disk form of adjacent entries, in pages from `take` or in place."""
        buffers: list[memoryview] = []
        for entry in entries:
            context = self._folder.context(segment, entry.page)
            (header,) = take(1)
            buffers.append(header)
            if entry.kind is not PageKind.OBJECT:
                frame_page(header, entry.kind, context, entry.encoded)
            elif self._cipher is not None:
                buffers += self._sealed(self._cipher, entry, context, take, header)
            else:
                fill_header(header, context, entry.encoded)
                _add_data(entry.memory, take, buffers)
        return buffers

    def lay_out(self, file: SegmentFile, entries: Sequence[LogEntry], pages: RingPages) -> IoRun:
        """Returns adjacent, unencrypted entries for the ring: as `encode_run`, ten times as fast. Raises OutOfPages."""
        packed: list[bytes] = []
        num_pages = num_taken = 0
        for page, extent, kind, encoded, memory in entries:
            length = len(memory)
            address = address_of(memory) if length else 0
            copied = -(-(length % PAGE if address % PAGE == 0 else length) // PAGE)
            if copied > MAX_COPIED_PAGES:
                raise OutOfPages
            packed += _ENTRY.pack(address, length, page, kind, len(encoded)), encoded
            num_pages += extent
            num_taken += 1 + copied
        taken = pages.take_addresses(num_taken)
        vectors = (ctypes.c_uint64 * (2 * (num_taken + len(entries))))()
        head = frame_head(self._folder.folder_id, file.number)
        count = self._lay_out(b"".join(packed), len(entries), head, struct.pack(f"{num_taken}Q", *taken), vectors)
        return IoRun(file.fileno(), entries[0].page, vectors, count, num_pages * PAGE, entries)

    def _sealed(
        self, cipher: AesGcm, entry: LogEntry, context: PageContext, take: TakePages, header: memoryview
    ) -> list[memoryview]:
        length = len(entry.memory)
        associated = sealed_with(context, entry.encoded)
        (data,) = take(entry.num_pages - 1)
        tag = cipher.seal(context.nonce(), associated, entry.memory, data[:length])
        _fill([data[length:]], b"")
        fill_header(header, context, entry.encoded, tag)
        return [data]

    def read(self, file: SegmentFile, reads: Sequence[DiskRead]) -> list[bool]:
        """Reads adjacent objects, in order. Returns True for each valid object. Raises OSError."""
        num_pages = sum(extent_pages(read.object.length) for read in reads)
        with self._scratch.borrow(num_pages * PAGE) as scratch:
            landing = self.buffers_for(reads, pages_from(scratch))
            return self.verify_run(landing, file.read(landing.page, landing.buffers))

    def buffers_for(self, reads: Sequence[DiskRead], take: TakePages) -> RunBuffers:
        """Returns the buffers that receive adjacent objects, in order."""
        arrivals: list[ObjectBuffers] = []
        buffers: list[memoryview] = []
        total = 0
        for read in reads:
            arrivals.append(self._aimed(read, take, buffers))
            total += extent_pages(read.object.length)
        begin = reads[0].place
        return RunBuffers(arrivals, buffers, segment_of(begin), page_of(begin), total)

    def _aimed(self, read: DiskRead, take: TakePages, buffers: list[memoryview]) -> ObjectBuffers:
        (header,) = take(1)
        buffers.append(header)
        length = read.object.length
        whole = 0 if self._cipher is not None else length // PAGE * PAGE
        direct = in_place(read.memory, whole) if whole else None
        if direct is None:
            whole = 0
        else:
            buffers.append(direct)
        rest = take(extent_pages(length - whole) - 1) if whole < length else []
        buffers += rest
        return ObjectBuffers(read, header, whole, rest)

    def verify_run(self, landing: RunBuffers, nbytes: int | None = None) -> list[bool]:
        """Verifies a run after `nbytes` were read (None = all); at a file's end they may be fewer than requested."""
        whole = landing.page + (landing.num_pages if nbytes is None else nbytes // PAGE)
        return [
            page_of(arrival.read.place) + extent_pages(arrival.read.object.length) <= whole
            and self._arrived(landing.segment, arrival)
            for arrival in landing.arrivals
        ]

    def _arrived(self, segment: int, arrival: ObjectBuffers) -> bool:
        """Copies the object's remaining data into its memory and verifies it."""
        about, memory = arrival.read.object, arrival.read.memory
        context = self._folder.context(segment, page_of(arrival.read.place))
        if not header_matches(arrival.header, context, about):
            return False
        if self._cipher is not None:
            data = arrival.rest[0][: about.length] if arrival.rest else memoryview(b"")
            header = decode_header(arrival.header, context)
            if header is None or not self.decrypt(context.nonce(), header, data, memory):
                return False
        else:
            _copy_out(arrival.rest, memory[arrival.direct :])
        return xxh3_64_intdigest(memory) == about.checksum

    def decrypt(self, nonce: bytes, header: Header, data: memoryview, into: memoryview) -> bool:
        assert self._cipher is not None
        return self._cipher.open(nonce, header.sealed_with, header.tag, data, into)

    def is_whole(self, segment: int, header: Header, extent: memoryview) -> bool:
        """True if the data after a header matches its checksum."""
        assert header.record is not None
        about = header.record.object
        data = extent[PAGE : PAGE + about.length]
        if self._cipher is None:
            return xxh3_64_intdigest(data) == about.checksum
        nonce = self._folder.context(segment, header.record.page).nonce()
        with self._scratch.borrow(about.length) as plain:
            into = plain[: about.length]
            return self.decrypt(nonce, header, data, into) and (xxh3_64_intdigest(into) == about.checksum)


def _add_data(memory: memoryview, take: TakePages, buffers: list[memoryview]) -> None:
    """Adds unencrypted data, in place if possible."""
    whole = len(memory) // PAGE * PAGE
    direct = in_place(memory, whole) if whole else None
    if direct is not None:
        buffers.append(direct)
        if whole == len(memory):
            return
        memory = memory[whole:]
    if memory:
        rest = take(extent_pages(len(memory)) - 1)
        _fill(rest, memory)
        buffers += rest


def _fill(pages: Sequence[memoryview], content: bytes | memoryview) -> None:
    """Fills pages with content and zeroes the rest: no other data may reach the disk."""
    at = 0
    for page in pages:
        part = content[at : at + len(page)]
        page[: len(part)] = part
        at += len(page)
    left = at - len(content)
    if left:
        pages[-1][-left:] = bytes(left)


def _copy_out(pages: Sequence[memoryview], memory: memoryview) -> None:
    at = 0
    for page in pages:
        length = min(len(page), len(memory) - at)
        memory[at : at + length] = page[:length]
        at += length
