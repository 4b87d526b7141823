"""Files that keep a node's removals, and when it was last in touch with its cluster, over restarts. Blocking.

Removals are appended records. Each has a checksum, so that a torn or damaged record does not affect the others. The
file is not synced: a removal that a power loss took is learned again from other nodes, and its objects are forgotten
by the disk tier's own durable tombstones.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvstore.removals import Heard
from protocol.keys import BlockKey

PRESENCE_FILE_NAME = "presence.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """An instant that can be compared across processes, reboots and clock changes as far as possible."""

    boot: str
    boot_s: float  # since boot, suspension included
    wall_s: float

    @classmethod
    def now(cls) -> Stamp:
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return cls(boot=boot, boot_s=time.clock_gettime(time.CLOCK_BOOTTIME), wall_s=time.time())

    def until(self, later: Stamp) -> float | None:
        """Returns the seconds until `later`; None if unknown: another boot, and the wall clock went back."""
        if self.boot and self.boot == later.boot:
            return max(later.boot_s - self.boot_s, 0.0)
        passed_s = later.wall_s - self.wall_s
        return passed_s if passed_s >= 0 else None


class Presence:
    """File with the time of a node's last contact with its cluster, and its coverage of removals then."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PRESENCE_FILE_NAME

    def read(self) -> tuple[Stamp, float] | None:
        """Returns the last contact and coverage in seconds; None if the file is absent or unreadable."""
        try:
            entry = json.loads(self._path.read_text())
            return Stamp(**entry["at"]), float(entry["covered_s"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, covered_s: float) -> None:
        """Replaces the file. Raises OSError. Not synced: an older file only means a longer absence."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"at": asdict(Stamp.now()), "covered_s": covered_s}))
        os.replace(fresh, self._path)


FILE_NAME = "removals"
_MAGIC = b"MSKVREM1"
_RECORD = struct.Struct("<16sQ36sdd")  # key, id, boot, seconds since boot, wall clock
_SUM = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size + _SUM.size


class RemovalFile:
    """Append-only file of removals. To be used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def load(self) -> list[Heard]:
        """Returns all intact removals, with age 0 if it is unknown. Raises OSError."""
        if not self._path.exists():
            return []
        now = Stamp.now()
        return [
            Heard(key, removal_id, at.until(now) or 0.0) for key, removal_id, at in _records(self._path.read_bytes())
        ]

    def append(self, removals: Sequence[Heard]) -> None:
        """Appends removals. Raises OSError."""
        with self._path.open("ab") as file:
            if not file.tell():
                file.write(_MAGIC)
            file.write(b"".join(_encoded(removals)))

    def rewrite(self, removals: Sequence[Heard]) -> None:
        """Replaces the file by one with these removals. Raises OSError."""
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(_MAGIC + b"".join(_encoded(removals)))
        os.replace(fresh, self._path)


def _encoded(removals: Iterable[Heard]) -> Iterator[bytes]:
    now = Stamp.now()
    boot = now.boot.encode()
    for key, removal_id, age_s in removals:
        record = _RECORD.pack(key, removal_id, boot, now.boot_s - age_s, now.wall_s - age_s)
        yield record + _SUM.pack(xxh3_64_intdigest(record))


def _records(content: bytes) -> Iterator[tuple[BlockKey, int, Stamp]]:
    if not content.startswith(_MAGIC):
        return
    for begin in range(len(_MAGIC), len(content) - RECORD_BYTES + 1, RECORD_BYTES):
        record = content[begin : begin + _RECORD.size]
        [expected] = _SUM.unpack_from(content, begin + _RECORD.size)
        if xxh3_64_intdigest(record) == expected:
            key, removal_id, boot, boot_s, wall_s = _RECORD.unpack(record)
            stamp = Stamp(boot=boot.rstrip(b"\0").decode(), boot_s=boot_s, wall_s=wall_s)
            yield BlockKey(key), removal_id, stamp
