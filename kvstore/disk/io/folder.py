"""A folder of the SSD tier: its identity, its lock and its segment files. Blocking; for I/O threads and for startup.

`folder.json` holds the identity, `segment-N.kv` are segments, and `free-N.kv` are files of former segments. Free files
are kept because writing to blocks written before is 2.5 times as fast as to fresh ones. Segment numbers are never
reused, even over restarts. Knows nothing of objects.
"""

import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moonserve.kvstore.disk.base import PAGE
from moonserve.kvstore.disk.health import HangTracker
from moonserve.kvstore.disk.io.buffers import AlignedScratch
from moonserve.kvstore.disk.io.encryption import AesGcm, read_key
from moonserve.kvstore.disk.io.format import (
    FORMAT_VERSION,
    LOG_BEGIN,
    SEGMENT_BITS,
    PageContext,
    PageKind,
    context_of,
    fill_head,
    frame_page,
)
from moonserve.kvstore.disk.io.segment_file import FileCalls, SegmentFile, open_file, replace_durably
from moonserve.protocol.errors import ConfigError

NO_CIPHER = "none"
_IDENTITY_FILE = "folder.json"
_LOCK_FILE = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderIdentity:
    """Content of `folder.json`."""

    format: int
    folder_id: str  # 16 random bytes in hexadecimal
    cipher: str
    key_check: str
    numbers_below: int  # all segment numbers ever used are below this


def lock_folder(path: Path) -> int:
    """Creates the folder if needed and locks it until the file descriptor is closed. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / _LOCK_FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"SSD folder {path} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"SSD folder {path} is in use by another process") from error
    return fd


def identify_folder(path: Path, key_file: Path | None, *, used: bool) -> tuple[FolderIdentity, AesGcm | None]:
    """Returns the identity, created for a new folder; a `used` folder must have one. Raises ConfigError."""
    key = read_key(key_file) if key_file else None
    try:
        identity = read_identity(path)
    except FileNotFoundError:
        if used:
            raise ConfigError(
                f"{path} holds segments but no {_IDENTITY_FILE}: restore it, or empty the folder"
            ) from None
        return _new_identity(path, key)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path / _IDENTITY_FILE} cannot be read: {error}") from error
    return identity, _cipher_of(identity, path, key)


def read_identity(path: Path) -> FolderIdentity:
    """Reads the identity. Raises OSError, or ValueError or TypeError for an invalid file."""
    identity = FolderIdentity(**json.loads((path / _IDENTITY_FILE).read_text()))
    if len(bytes.fromhex(identity.folder_id)) != 16 or not isinstance(identity.numbers_below, int):
        raise ValueError("it is damaged")
    return identity


def write_identity(path: Path, identity: FolderIdentity) -> None:
    """Replaces the identity atomically and durably. Raises OSError."""
    replace_durably(path / _IDENTITY_FILE, json.dumps(asdict(identity)))


def _new_identity(path: Path, key: bytes | None) -> tuple[FolderIdentity, AesGcm | None]:
    folder_id = secrets.token_bytes(16)
    cipher = AesGcm(key, folder_id) if key else None
    identity = FolderIdentity(
        format=FORMAT_VERSION,
        folder_id=folder_id.hex(),
        cipher=cipher.name if cipher else NO_CIPHER,
        key_check=cipher.key_check if cipher else "",
        numbers_below=1,
    )
    try:
        write_identity(path, identity)
    except OSError as error:
        raise ConfigError(f"SSD folder {path} cannot be written to: {error.strerror}") from error
    return identity, cipher


def _cipher_of(identity: FolderIdentity, path: Path, key: bytes | None) -> AesGcm | None:
    if identity.format != FORMAT_VERSION:
        raise ConfigError(f"{path} has format {identity.format}, this version reads {FORMAT_VERSION}: empty it")
    if identity.cipher == NO_CIPHER:
        if key:
            raise ConfigError(f"{path} is not encrypted: empty it, or leave out the key file")
        return None
    if identity.cipher != AesGcm.name or not key:
        raise ConfigError(f"{path} is encrypted with {identity.cipher}: its key file is needed")
    cipher = AesGcm(key, bytes.fromhex(identity.folder_id))
    if cipher.key_check != identity.key_check:
        raise ConfigError(f"{path} was encrypted with another key than the key file's")
    return cipher


MAX_SEGMENT_NUMBER = 2**SEGMENT_BITS - 1

_NUMBERS_AT_ONCE = 64
"""Segment numbers reserved per write of `folder.json`. A restart may skip up to this many."""
_NAME = re.compile(r"(segment|free)-(\d{10})\.kv")


class Folder:
    """A locked folder."""

    def __init__(
        self,
        path: Path,
        key_file: Path | None,
        *,
        calls: FileCalls,
        scratch: AlignedScratch,
        waits: HangTracker,
    ) -> None:
        """Raises ConfigError if the folder is in use or does not match the configuration."""
        self.path = path
        self.direct = True  # bypass the page cache, if the file system supports it
        self._calls = calls
        self._scratch = scratch
        self._waits = waits
        self._lock = lock_folder(path)
        try:
            used = bool(self.segments())
            self.identity, self.cipher = identify_folder(path, key_file, used=used)
            self.folder_id = bytes.fromhex(self.identity.folder_id)
            self._next_number = max([self.identity.numbers_below - 1, *self.segments()]) + 1
            self._check_heads()
        except BaseException:  # no caller can close it yet
            self.close()
            raise

    def context(self, segment: int, page: int) -> PageContext:
        return PageContext(self.folder_id, segment, page)

    def segments(self) -> list[int]:
        return sorted(number for kind, number in self._names() if kind == "segment")

    def open(self, number: int) -> SegmentFile:
        fd, self.direct = open_file(self._path("segment", number), create=False, direct=self.direct)
        return SegmentFile(fd, number, self._calls, self._waits)

    def create(self, nbytes: int) -> SegmentFile:
        """Creates the next, empty segment. A full disk shows here, not later.

        Its name and head become durable by `sync_names` and its own sync. After a crash before that, the file still has
        its old name, or pages of its earlier use, which are not accepted as its own.
        """
        with self._waits:
            number = self._reserve_number()
            spare = next(self._spares(nbytes), None)
            path = spare or self._path("free", number)
            fd, self.direct = open_file(path, create=spare is None, direct=self.direct)
            file = SegmentFile(fd, number, self._calls, self._waits)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                self._write_head(file, nbytes)
                self._calls.rename(path, self._path("segment", number))
            except BaseException:  # also on interruption: leave no incomplete segment behind
                file.close()
                if spare is None:
                    path.unlink(missing_ok=True)
                raise
            return file

    def recycle(self, number: int) -> None:
        """Turns a segment into a free file, durably."""
        with self._waits:
            self._calls.rename(self._path("segment", number), self._path("free", number))
            self._calls.sync_folder(self.path)

    def sync_names(self) -> None:
        """Makes the names of created files durable."""
        with self._waits:
            self._calls.sync_folder(self.path)

    def drop_spares(self, *, keep: int, nbytes: int) -> None:
        """Deletes files of former segments, except `keep` of the right size."""
        kept = set(list(self._spares(nbytes))[:keep])
        for kind, number in self._names():
            path = self._path(kind, number)
            if kind == "free" and path not in kept:
                path.unlink()

    def check_readable(self, files: Sequence[SegmentFile]) -> None:
        """Raises OSError unless the path still holds the folder of `files` and can be read."""
        with self._waits:
            self._check_names(files)
            with self._scratch.borrow(PAGE) as page:
                for file in files[-1:]:
                    file.read(0, [page[:PAGE]])

    def _check_names(self, files: Sequence[SegmentFile]) -> None:
        try:
            folder_id = read_identity(self.path).folder_id
        except (ValueError, TypeError) as error:
            raise FileNotFoundError(errno.ENOENT, f"folder.json: {error}") from error
        if folder_id != self.identity.folder_id:
            raise FileNotFoundError(errno.ENOENT, "it is another folder now")
        for file in files:
            stat = self._path("segment", file.number).stat()
            if (stat.st_dev, stat.st_ino) != file.inode:
                raise FileNotFoundError(errno.ENOENT, f"segment {file.number} is another file now")

    def check_writable(self) -> None:
        """Raises OSError if the folder cannot be written to."""
        with self._waits:
            self._write_identity(self.identity)

    def close(self) -> None:
        os.close(self._lock)

    def _reserve_number(self) -> int:
        number = self._next_number
        if number > MAX_SEGMENT_NUMBER:
            raise OSError(errno.EFBIG, f"{self.path} has used up its segment numbers")
        if number >= self.identity.numbers_below:
            self._write_identity(replace(self.identity, numbers_below=number + _NUMBERS_AT_ONCE))
        self._next_number += 1
        return number

    def _write_identity(self, identity: FolderIdentity) -> None:
        write_identity(self.path, identity)
        self.identity = identity

    def _write_head(self, file: SegmentFile, nbytes: int) -> None:
        with self._scratch.borrow(2 * PAGE) as scratch:
            head, end_mark = scratch[:PAGE], scratch[PAGE : 2 * PAGE]
            fill_head(head, self.context(file.number, 0), nbytes // PAGE, self.identity.cipher)
            frame_page(end_mark, PageKind.END, self.context(file.number, LOG_BEGIN))
            file.write(0, [head, end_mark])

    def _check_heads(self) -> None:
        """Raises ConfigError for segments of another folder, which would look empty and be overwritten."""
        for number in self.segments():
            with self._path("segment", number).open("rb") as file:
                context = context_of(memoryview(file.read(PAGE)))
            if context is not None and context.folder_id != self.folder_id:
                raise ConfigError(f"segment {number} in {self.path} belongs to another folder: move it away")

    def _spares(self, nbytes: int) -> Iterator[Path]:
        for kind, number in self._names():
            path = self._path(kind, number)
            if kind == "free" and path.stat().st_size == nbytes:
                yield path

    def _names(self) -> list[tuple[str, int]]:
        matches = map(_NAME.fullmatch, os.listdir(self.path))
        return [(match[1], int(match[2])) for match in matches if match]

    def _path(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:010}.kv"
