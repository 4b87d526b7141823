"""API keys in a JSON file that `moonserve keys` writes and gateways read.

Writers take turns with a lock file next to the key file, which they replace atomically, so a reader never sees a part
of it. Only its owner can read it (mode 0600): digests do not reveal the keys, but tenants and limits are confidential.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from moonserve.gateway.access.api_key import ApiKey, from_json
from moonserve.protocol.errors import ConfigError, InvalidRequest

MAX_FILE_BYTES = 64 * 2**20
Stamp = tuple[int, int, int]
"""Inode, size and time of the last change in ns; differs after each change of the file."""


def read(path: Path) -> list[ApiKey]:
    """Reads all keys. Blocks. Raises ConfigError that names the faulty key."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON file that `moonserve keys` wrote: {error}") from error
    records = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(records, list):
        raise ConfigError(f'{path} is not {{"keys": […]}} as `moonserve keys` writes it; create it with that command')
    return [_parsed(path, number, record) for number, record in enumerate(records, 1)]


def _parsed(path: Path, number: int, record: object) -> ApiKey:
    try:
        return from_json(record)
    except InvalidRequest as error:
        raise ConfigError(f"{path}: key {number}: {error.message}") from error


def stamp(path: Path) -> Stamp | None:
    """Returns the file's stamp, or None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class KeyFile:
    """A KeyStore (`gateway.access.key_table`) backed by a file. Reads and writes run in threads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def all(self) -> list[ApiKey]:
        return await asyncio.to_thread(read, self._path)

    async def add(self, key: ApiKey) -> None:
        await asyncio.to_thread(self._add, key)

    async def revoke(self, key_id: str) -> bool:
        return await asyncio.to_thread(self._revoke, key_id)

    async def version(self) -> Stamp | None:
        return stamp(self._path)

    async def close(self) -> None: ...

    def _add(self, key: ApiKey) -> None:
        with self._lock():
            others = [each for each in self._present() if each.digest != key.digest]
            self._replace([*others, key])

    def _revoke(self, key_id: str) -> bool:
        with self._lock():
            keys = self._present()
            kept = [key for key in keys if key.key_id != key_id]
            if len(kept) < len(keys):
                self._replace(kept)
            return len(kept) < len(keys)

    def _present(self) -> list[ApiKey]:
        return read(self._path) if self._path.exists() else []

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        lock_path = self._path.with_name(self._path.name + ".lock")
        try:
            descriptor = os.open(lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot create a lock file next to {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _replace(self, keys: Iterable[ApiKey]) -> None:
        text = json.dumps({"keys": [key.to_json() for key in keys]}, indent=1)
        try:
            # Created with mode 0600, and on the same file system so that replacing is atomic.
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".keys-")
            with os.fdopen(descriptor, "w") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error
