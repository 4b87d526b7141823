"""Survey of a segment file: from its footer or, without one, by scanning its log. Blocking; for I/O threads.

The log is valid up to the first invalid page, data included. It ends well if that page is the end mark of its last
group. Knows nothing of other segments, so it does not know which objects are live.
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
"""Pages read at a time during a scan."""


@dataclass(slots=True)
class Survey:
    number: int
    num_pages: int
    log_end: int = LOG_BEGIN
    tombstones: bytes = b""
    trailer: Trailer | None = None
    """None: the segment was scanned, or must be."""
    records: list[Record] = field(default_factory=list)
    """Records of a scanned segment. Records of a footer are read on demand."""
    torn: str = ""
    """Reason why the log ends early; empty if it ends properly."""
    error: OSError | None = None
    """Read error; the contents are then unknown."""


class Surveyor:
    """Surveys segments of one folder."""

    def __init__(self, folder: Folder, io: ObjectIo, scratch: Scratch) -> None:
        self._folder = folder
        self._io = io
        self._scratch = scratch

    def survey(self, file: SegmentFile) -> Survey:
        """Surveys a segment, without the records of its footer."""
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
        """Returns all objects of the log, dead ones included. A footer that proves invalid leads to a scan."""
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
        """Reads the head. A truncated file still counts with all its pages; a damaged head is harmless."""
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
        """Reads a section of the footer that has `behind` pages between it and the trailer."""
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
        """Yields headers up to the end of the log. The caller advances `log_end`."""
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
        """True if a group that was started while the end mark was being written follows it."""
        header = decode_header(window.view(page, 1), self._folder.context(number, page))
        return header is not None and header.kind in _IN_LOG

    def _is_whole(self, window: Window, segment: int, header: Header) -> bool:
        assert header.record is not None
        num_pages = header.record.num_pages
        extent = window.view(header.record.page, num_pages)
        return len(extent) == num_pages * PAGE and self._io.is_whole(segment, header, extent)


class Window:
    """View of a file through a buffer that moves forward as later pages are requested."""

    def __init__(self, file: SegmentFile, scratch: Scratch) -> None:
        self._file = file
        self._scratch = scratch
        self._borrowed = ExitStack()
        self._begin = 0
        self._held = memoryview(b"")

    def view(self, page: int, num_pages: int) -> memoryview:
        """Returns the requested pages, fewer at the end of the file. Valid until the next call."""
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
    """Pins changed after their objects were written, from the log of one folder.

    Takes about 200 bytes for each changed key.
    """

    def __init__(self) -> None:
        self._latest: dict[BlockKey, tuple[int, Pin]] = {}

    def note(self, change: Tombstone) -> None:
        """Records a pin change."""
        assert change.pin is not None
        known = self._latest.get(change.key)
        if known is None or change.generation > known[0]:
            self._latest[change.key] = change.generation, change.pin

    def current(self, about: DiskObject) -> DiskObject:
        """Returns the object with its current pin."""
        number, pin = self._latest.get(about.key, (0, about.pin))
        return about if number < about.generation or pin is about.pin else replace(about, pin=pin)
