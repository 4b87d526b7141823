"""Objects between memory and a segment file, in runs that lie next to each other. Blocking; for I/O threads.

Its rule: what it says it has read has the right header at the right place and bytes that match their checksum. Knows
neither what is live nor who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.disk.base import PAGE, DiskRead
from kvstore.disk.cipher import AesGcm
from kvstore.disk.files import SegmentFile
from kvstore.disk.folder import Folder
from kvstore.disk.format import (
    Header,
    decode_header,
    encode_tombstones,
    extent_pages,
    fill_end,
    fill_header,
    holds,
    page_of,
    sealed_with,
    segment_of,
)
from kvstore.disk.memory import Scratch, is_aligned


class ObjectEntry(NamedTuple):
    """An object to write at a page."""

    page: int
    num_pages: int
    encoded_record: bytes
    memory: memoryview


class TombstonesEntry(NamedTuple):
    page: int
    packed: bytes
    num_pages: int = 1


class EndEntry(NamedTuple):
    """Says that the log was whole up to here; the next run is written over it."""

    page: int
    num_pages: int = 1


Entry = ObjectEntry | TombstonesEntry | EndEntry


class Landing(NamedTuple):
    """Where a run of reads goes to: headers and what is padded into `scratch`, data to where it is wanted if it can."""

    reads: Sequence[DiskRead]
    extents: Sequence[memoryview]
    direct: Sequence[int]
    """Bytes of each object that are read to where they are wanted."""
    buffers: Sequence[memoryview]
    segment: int
    page: int
    num_pages: int


class ObjectIo:
    """Runs of one folder."""

    def __init__(self, folder: Folder, scratch: Scratch) -> None:
        self._folder = folder
        self._cipher: AesGcm | None = folder.cipher
        self._scratch = scratch

    def write(self, file: SegmentFile, entries: Sequence[Entry]) -> None:
        """Raises OSError. `entries` are neighbours, in order."""
        with self._scratch.borrow(pages_of(entries) * PAGE) as scratch:
            file.write(entries[0].page, self.laid_out(file.number, entries, scratch))

    def laid_out(
        self, segment: int, entries: Sequence[Entry], scratch: memoryview
    ) -> list[memoryview]:
        """The pages of neighbours, in order: in `scratch`, which has room for all, or where they are already."""
        buffers: list[memoryview] = []
        begin = entries[0].page
        for entry in entries:
            at = (entry.page - begin) * PAGE
            extent = scratch[at : at + entry.num_pages * PAGE]
            buffers += self._laid_out(segment, entry, extent)
        return buffers

    def _laid_out(self, segment: int, entry: Entry, extent: memoryview) -> list[memoryview]:
        context = self._folder.context(segment, entry.page)
        if isinstance(entry, TombstonesEntry):
            _fill(extent, encode_tombstones(context, entry.packed))
            return [extent]
        if isinstance(entry, EndEntry):
            fill_end(extent, context)
            return [extent]
        header, data = extent[:PAGE], extent[PAGE:]
        if self._cipher is None:
            fill_header(header, context, entry.encoded_record)
            return [header, *_plain(entry.memory, data)]
        associated = sealed_with(context, entry.encoded_record)
        length = len(entry.memory)
        tag = self._cipher.seal(context.nonce(), associated, entry.memory, data[:length])
        _fill(data[length:])
        fill_header(header, context, entry.encoded_record, tag)
        return [extent]

    def read(self, file: SegmentFile, reads: Sequence[DiskRead]) -> list[bool]:
        """Raises OSError. `reads` are neighbours, in order."""
        with self._scratch.borrow(pages_to_read(reads) * PAGE) as scratch:
            landing = self.aimed(reads, scratch)
            return self.arrived(landing, file.read(landing.page, landing.buffers))

    def aimed(self, reads: Sequence[DiskRead], scratch: memoryview) -> Landing:
        """Where neighbours, in order, are read to. `scratch` has room for all of them."""
        extents, buffers, direct = [], [], []
        at = 0
        for read in reads:
            end = at + extent_pages(read.object.length) * PAGE
            extents.append(scratch[at:end])
            direct.append(self._direct_bytes(read))
            buffers += _targets(read, extents[-1], direct[-1])
            at = end
        begin = reads[0].place
        return Landing(
            reads, extents, direct, buffers, segment_of(begin), page_of(begin), at // PAGE
        )

    def arrived(self, landing: Landing, nbytes: int | None = None) -> list[bool]:
        """Which objects are there after so many bytes, which are fewer than asked for at a file's end; None = all."""
        whole = landing.page + (landing.num_pages if nbytes is None else nbytes // PAGE)
        return [
            page_of(read.place) + extent_pages(read.object.length) <= whole
            and self._arrived(landing.segment, read, extent, direct)
            for read, extent, direct in zip(
                landing.reads, landing.extents, landing.direct, strict=True
            )
        ]

    def _direct_bytes(self, read: DiskRead) -> int:
        """Of the object, what is read to where it is wanted."""
        if self._cipher is not None or not is_aligned(read.memory):
            return 0
        return _whole_pages(read.object.length)

    def _arrived(self, segment: int, read: DiskRead, extent: memoryview, direct: int) -> bool:
        """Puts the object into its memory, as far as it does not lie there yet, and verifies it."""
        about, memory = read.object, read.memory
        context = self._folder.context(segment, page_of(read.place))
        if not holds(extent[:PAGE], context, about):
            return False
        if self._cipher is not None:
            data = extent[PAGE : PAGE + about.length]
            header = decode_header(extent[:PAGE], context)
            if header is None or not self.opened(context.nonce(), header, data, memory):
                return False
        elif direct < about.length:
            memory[direct:] = extent[PAGE + direct : PAGE + about.length]
        return xxh3_64_intdigest(memory) == about.checksum

    def opened(self, nonce: bytes, header: Header, data: memoryview, into: memoryview) -> bool:
        assert self._cipher is not None
        return self._cipher.open(nonce, header.sealed_with, header.tag, data, into)

    def is_whole(self, segment: int, header: Header, extent: memoryview) -> bool:
        """Whether the data behind a header is what its writer meant."""
        assert header.record is not None
        about = header.record.object
        data = extent[PAGE : PAGE + about.length]
        if self._cipher is None:
            return xxh3_64_intdigest(data) == about.checksum
        nonce = self._folder.context(segment, header.record.page).nonce()
        with self._scratch.borrow(about.length) as plain:
            into = plain[: about.length]
            return self.opened(nonce, header, data, into) and (
                xxh3_64_intdigest(into) == about.checksum
            )


def pages_of(entries: Sequence[Entry]) -> int:
    return sum(entry.num_pages for entry in entries)


def pages_to_read(reads: Sequence[DiskRead]) -> int:
    return sum(extent_pages(read.object.length) for read in reads)


def _targets(read: DiskRead, extent: memoryview, direct: int) -> list[memoryview]:
    if not direct:
        return [extent]
    if direct == len(read.memory):
        return [extent[:PAGE], read.memory]
    return [extent[:PAGE], read.memory[:direct], extent[PAGE + direct :]]


def _plain(memory: memoryview, data: memoryview) -> list[memoryview]:
    if len(memory) == len(data) and is_aligned(memory):
        return [memory] if memory else []
    direct = _whole_pages(len(memory)) if is_aligned(memory) else 0
    if direct < len(data):
        _fill(data[direct:], memory[direct:])
    return [each for each in (memory[:direct], data[direct:]) if each]


def _whole_pages(length: int) -> int:
    return length // PAGE * PAGE


def _fill(memory: memoryview, content: bytes | memoryview = b"") -> None:
    """And zeros behind it: nothing of somebody else's may get onto the disk."""
    length = len(content)
    memory[:length] = content
    memory[length:] = bytes(len(memory) - length)
