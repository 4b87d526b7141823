"""What a segment file holds: by its footer, or where that is missing, by its log from the front. Blocking; for I/O
threads.

The log is believed up to the first page that is not what it should be, data included. It ends well when that page is
the end mark of its last group. Knows nothing of other segments, so not what is live.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from xxhash import xxh3_64_intdigest

from kvstore.disk.base import PAGE, DiskObject, Pin
from kvstore.disk.files import SegmentFile
from kvstore.disk.folder import Folder
from kvstore.disk.format import (
    LOG_BEGIN,
    Header,
    Kind,
    Record,
    Tombstone,
    Trailer,
    decode_head,
    decode_header,
    decode_records,
    decode_trailer,
    pages,
)
from kvstore.disk.memory import Scratch
from kvstore.disk.object_io import ObjectIo
from protocol.keys import BlockKey

_IN_LOG = (Kind.OBJECT, Kind.TOMBSTONES)
_AHEAD_PAGES = 4 * 2**20 // PAGE
"""Read at a time when a log is scanned."""


@dataclass(slots=True)
class Survey:
    number: int
    num_pages: int
    log_end: int = LOG_BEGIN
    tombstones: bytes = b""
    trailer: Trailer | None = None
    """None: it was scanned, or has to be."""
    records: list[Record] = field(default_factory=list)
    """Of a scanned one. Those of a footer are read when they are needed."""
    torn: str = ""
    """Why the log is believed no further; empty when it ends as it should."""
    error: OSError | None = None
    """It could not be read; nothing is said about what it holds."""


class Surveyor:
    """Reads segments of one folder."""

    def __init__(self, folder: Folder, io: ObjectIo, scratch: Scratch) -> None:
        self._folder = folder
        self._io = io
        self._scratch = scratch

    def survey(self, file: SegmentFile) -> Survey:
        """Everything but the records of a footer."""
        survey = Survey(file.number, file.num_pages)
        try:
            self._read_head(file, survey)
            if not self._read_trailer(file, survey):
                self._scan(file, survey)
        except OSError as error:
            survey.error = error
        return survey

    def everything(self, file: SegmentFile) -> tuple[Survey, list[Record]]:
        survey = self.survey(file)
        records = self.records(file, survey)
        return survey, records

    def records(self, file: SegmentFile, survey: Survey) -> list[Record]:
        """All objects of the log, dead ones included. May find out that the footer is no good after all."""
        if survey.trailer is None:
            return survey.records
        try:
            behind = pages(survey.trailer.tombstones_bytes)
            packed = self._section(file, survey, survey.trailer.records_bytes, behind)
            if xxh3_64_intdigest(packed) == survey.trailer.records_checksum:
                return decode_records(packed, survey.trailer.num_records)
            survey.trailer, survey.tombstones, survey.log_end = None, b"", LOG_BEGIN
            self._scan(file, survey)
        except OSError as error:
            survey.error = error
        return survey.records

    def _read_head(self, file: SegmentFile, survey: Survey) -> None:
        """A truncated file still counts with all its pages; a damaged head costs nothing."""
        head = self._read(file, 0, 1)
        num_pages = decode_head(memoryview(head), self._folder.context(file.number, 0))
        survey.num_pages = num_pages or max(survey.num_pages, LOG_BEGIN + 1)

    def _read_trailer(self, file: SegmentFile, survey: Survey) -> bool:
        last = survey.num_pages - 1
        page = memoryview(self._read(file, last, 1))
        trailer = decode_trailer(page, self._folder.context(file.number, last))
        if trailer is None:
            return False
        packed = self._section(file, survey, trailer.tombstones_bytes)
        if xxh3_64_intdigest(packed) != trailer.tombstones_checksum:
            return False
        survey.trailer, survey.log_end, survey.tombstones = trailer, trailer.log_end, packed
        return True

    def _section(self, file: SegmentFile, survey: Survey, nbytes: int, behind: int = 0) -> bytes:
        """Of the footer; `behind` it there are so many pages before the trailer."""
        num_pages = pages(nbytes)
        return self._read(file, survey.num_pages - 1 - behind - num_pages, num_pages)[:nbytes]

    def _read(self, file: SegmentFile, page: int, num_pages: int) -> bytes:
        if not num_pages:
            return b""
        with self._scratch.borrow(num_pages * PAGE) as scratch:
            nbytes = file.read(page, [scratch[: num_pages * PAGE]])
            return bytes(scratch[:nbytes])

    def _scan(self, file: SegmentFile, survey: Survey) -> None:
        with closing(Window(file, self._scratch)) as window:
            for header in self._headers(window, survey):
                if header.kind is Kind.TOMBSTONES:
                    survey.tombstones += header.tombstones
                    survey.log_end += 1
                elif header.record is not None:
                    survey.records.append(header.record)
                    survey.log_end += header.record.num_pages

    def _headers(self, window: Window, survey: Survey) -> Iterator[Header]:
        """Up to the end of the log; the receiver moves `log_end` on."""
        while True:
            page = survey.log_end
            context = self._folder.context(survey.number, page)
            header = decode_header(window.view(page, 1), context)
            if header is not None and header.kind is Kind.END:
                if not self._goes_on(window, survey.number, page + 1):
                    return
                survey.log_end += 1
                continue
            if header is None:
                survey.torn = f"no header in page {page}"
            elif header.record and not self._is_whole(window, survey.number, header):
                survey.torn = f"damaged object in page {page}"
            if header is None or survey.torn or header.kind not in _IN_LOG:
                return
            yield header

    def _goes_on(self, window: Window, number: int, page: int) -> bool:
        """Whether behind an end mark there is a group that was begun while the mark was being written."""
        header = decode_header(window.view(page, 1), self._folder.context(number, page))
        return header is not None and header.kind in _IN_LOG

    def _is_whole(self, window: Window, segment: int, header: Header) -> bool:
        assert header.record is not None
        num_pages = header.record.num_pages
        extent = window.view(header.record.page, num_pages)
        return len(extent) == num_pages * PAGE and self._io.is_whole(segment, header, extent)


class Window:
    """A file seen through a part of it in memory, which moves on as later pages are asked for."""

    def __init__(self, file: SegmentFile, scratch: Scratch) -> None:
        self._file = file
        self._scratch = scratch
        self._borrowed = ExitStack()
        self._begin = 0
        self._held = memoryview(b"")

    def view(self, page: int, num_pages: int) -> memoryview:
        """Fewer pages at the end of the file. Valid until the next call."""
        end = (page + num_pages - self._begin) * PAGE
        if page < self._begin or end > len(self._held):
            self._load(page, max(num_pages, _AHEAD_PAGES))
        at = (page - self._begin) * PAGE
        return self._held[at : at + num_pages * PAGE]

    def _load(self, page: int, num_pages: int) -> None:
        self.close()
        scratch = self._borrowed.enter_context(self._scratch.borrow(num_pages * PAGE))
        nbytes = self._file.read(page, [scratch[: num_pages * PAGE]])
        self._begin, self._held = page, scratch[: nbytes // PAGE * PAGE]

    def close(self) -> None:
        self._borrowed.close()


class Pins:
    """Pins that were changed after their objects were written, by the log of one folder.

    Takes about 200 bytes for each key whose pin was changed.
    """

    def __init__(self) -> None:
        self._latest: dict[BlockKey, tuple[int, Pin]] = {}

    def note(self, change: Tombstone) -> None:
        """One that has a pin."""
        assert change.pin is not None
        known = self._latest.get(change.key)
        if known is None or change.generation > known[0]:
            self._latest[change.key] = change.generation, change.pin

    def current(self, about: DiskObject) -> DiskObject:
        """With the pin that it has now."""
        number, pin = self._latest.get(about.key, (0, about.pin))
        return about if number < about.generation or pin is about.pin else replace(about, pin=pin)
