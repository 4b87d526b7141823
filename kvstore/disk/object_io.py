"""Objects between memory and a segment file, in runs that lie next to each other. Blocking; for I/O threads.

Its rule: what it says it has read has the right header at the right place and bytes that match their checksum. Knows
neither what is live nor who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from kvstore.disk.base import PAGE, DiskRead
from kvstore.disk.files import SegmentFile
from kvstore.disk.folder import Folder
from kvstore.disk.format import (
    Context,
    Header,
    Kind,
    decode_header,
    extent_pages,
    fill,
    fill_header,
    holds,
    page_of,
    sealed_with,
    segment_of,
)
from kvstore.disk.identity import AesGcm
from kvstore.disk.memory import Scratch, is_aligned


class Entry(NamedTuple):
    """What to write at a page. An end mark says that the log was whole up to here; the next run is written over it."""

    page: int
    num_pages: int
    kind: Kind  # OBJECT, TOMBSTONES or END
    encoded: bytes = b""  # the record, or the tombstones
    memory: memoryview = memoryview(b"")  # of an object


class Pages(Protocol):
    """Memory to move from and to."""

    def take(self, num_pages: int) -> list[memoryview]:
        """In one piece or in several, with whatever was in them."""

    def in_place(self, memory: memoryview, nbytes: int) -> memoryview | None:
        """The first bytes of somebody's memory, if they can be moved from or to where they are."""


class BorrowedPages:
    """`Pages` one behind the other, in scratch memory."""

    def __init__(self, scratch: memoryview) -> None:
        self._scratch = scratch
        self._begin = 0

    def take(self, num_pages: int) -> list[memoryview]:
        begin = self._begin
        self._begin += num_pages * PAGE
        return [self._scratch[begin : self._begin]]

    def in_place(self, memory: memoryview, nbytes: int) -> memoryview | None:
        return memory[:nbytes] if is_aligned(memory) else None


class Arrival(NamedTuple):
    """Where an object is read to: its header, and what does not go straight to where it is wanted."""

    read: DiskRead
    header: memoryview
    direct: int
    """Bytes that are read to where they are wanted."""
    rest: Sequence[memoryview]


class Landing(NamedTuple):
    """Where a run of reads goes to."""

    arrivals: Sequence[Arrival]
    buffers: Sequence[memoryview]
    segment: int
    page: int
    num_pages: int

    @property
    def is_direct(self) -> bool:
        """Whether something goes straight to where it is wanted."""
        return any(arrival.direct for arrival in self.arrivals)


class ObjectIo:
    """Runs of one folder."""

    def __init__(self, folder: Folder, scratch: Scratch) -> None:
        self._folder = folder
        self._cipher: AesGcm | None = folder.cipher
        self._scratch = scratch

    def write(self, file: SegmentFile, entries: Sequence[Entry]) -> None:
        """Raises OSError. `entries` are neighbours, in order."""
        with self._scratch.borrow(pages_of(entries) * PAGE) as scratch:
            file.write(entries[0].page, self.laid_out(file.number, entries, BorrowedPages(scratch)))

    def laid_out(self, segment: int, entries: Sequence[Entry], pages: Pages) -> list[memoryview]:
        """What neighbours are on disk, in order: in `pages`, or where it is already."""
        buffers: list[memoryview] = []
        for entry in entries:
            context = self._folder.context(segment, entry.page)
            (header,) = pages.take(1)
            buffers.append(header)
            if entry.kind is not Kind.OBJECT:
                fill(header, entry.kind, context, entry.encoded)
            elif self._cipher is not None:
                buffers += self._sealed(self._cipher, entry, context, pages, header)
            else:
                fill_header(header, context, entry.encoded)
                _lay_out(entry.memory, pages, buffers)
        return buffers

    def _sealed(
        self, cipher: AesGcm, entry: Entry, context: Context, pages: Pages, header: memoryview
    ) -> list[memoryview]:
        length = len(entry.memory)
        associated = sealed_with(context, entry.encoded)
        (data,) = pages.take(entry.num_pages - 1)
        tag = cipher.seal(context.nonce(), associated, entry.memory, data[:length])
        _fill([data[length:]], b"")
        fill_header(header, context, entry.encoded, tag)
        return [data]

    def read(self, file: SegmentFile, reads: Sequence[DiskRead]) -> list[bool]:
        """Raises OSError. `reads` are neighbours, in order."""
        with self._scratch.borrow(pages_to_read(reads) * PAGE) as scratch:
            landing = self.aimed(reads, BorrowedPages(scratch))
            return self.arrived(landing, file.read(landing.page, landing.buffers))

    def aimed(self, reads: Sequence[DiskRead], pages: Pages) -> Landing:
        """Where neighbours, in order, are read to."""
        arrivals: list[Arrival] = []
        buffers: list[memoryview] = []
        total = 0
        for read in reads:
            arrivals.append(self._aimed(read, pages, buffers))
            total += extent_pages(read.object.length)
        begin = reads[0].place
        return Landing(arrivals, buffers, segment_of(begin), page_of(begin), total)

    def _aimed(self, read: DiskRead, pages: Pages, buffers: list[memoryview]) -> Arrival:
        (header,) = pages.take(1)
        buffers.append(header)
        length = read.object.length
        whole = 0 if self._cipher is not None else length // PAGE * PAGE
        direct = pages.in_place(read.memory, whole) if whole else None
        if direct is None:
            whole = 0
        else:
            buffers.append(direct)
        rest = pages.take(extent_pages(length - whole) - 1) if whole < length else []
        buffers += rest
        return Arrival(read, header, whole, rest)

    def arrived(self, landing: Landing, nbytes: int | None = None) -> list[bool]:
        """Which objects are there after so many bytes, which are fewer than asked for at a file's end; None = all."""
        whole = landing.page + (landing.num_pages if nbytes is None else nbytes // PAGE)
        return [
            page_of(arrival.read.place) + extent_pages(arrival.read.object.length) <= whole
            and self._arrived(landing.segment, arrival)
            for arrival in landing.arrivals
        ]

    def _arrived(self, segment: int, arrival: Arrival) -> bool:
        """Puts the object into its memory, as far as it does not lie there yet, and verifies it."""
        about, memory = arrival.read.object, arrival.read.memory
        context = self._folder.context(segment, page_of(arrival.read.place))
        if not holds(arrival.header, context, about):
            return False
        if self._cipher is not None:
            data = arrival.rest[0][: about.length] if arrival.rest else memoryview(b"")
            header = decode_header(arrival.header, context)
            if header is None or not self.opened(context.nonce(), header, data, memory):
                return False
        else:
            _copy_out(arrival.rest, memory[arrival.direct :])
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
            return self.opened(nonce, header, data, into) and (xxh3_64_intdigest(into) == about.checksum)


def pages_of(entries: Sequence[Entry]) -> int:
    return sum(entry.num_pages for entry in entries)


def pages_to_read(reads: Sequence[DiskRead]) -> int:
    return sum(extent_pages(read.object.length) for read in reads)


def _lay_out(memory: memoryview, pages: Pages, buffers: list[memoryview]) -> None:
    """Data as it is."""
    whole = len(memory) // PAGE * PAGE
    direct = pages.in_place(memory, whole) if whole else None
    if direct is not None:
        buffers.append(direct)
        if whole == len(memory):
            return
        memory = memory[whole:]
    if memory:
        rest = pages.take(extent_pages(len(memory)) - 1)
        _fill(rest, memory)
        buffers += rest


def _fill(pages: Sequence[memoryview], content: bytes | memoryview) -> None:
    """And zeros behind it: nothing of somebody else's may get onto the disk."""
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
