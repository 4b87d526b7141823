"""Removals of a running node: executes them, learns them from other nodes, saves them in its folder.

An object that was stored before a removal is gone once `remove` or `learn` returns, and stays gone after a restart once
`remove` returns or `is_saved` is True. A later object stays. If the folder cannot be written, only memory and the other
nodes keep removals; failures of the disk tier are counted. Knows no other nodes (`kvstore.node.catch_up`).

The files also keep when the node was last in touch with its cluster. Removals are appended records, each with a
checksum, so that a torn or damaged record does not affect the others. The file is not synced: a removal that a power
loss took is learned again from other nodes, and its objects are forgotten by the disk tier's own durable tombstones.
"""

import asyncio
import json
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from moonserve.kvstore.disk.base import DiskObject
from moonserve.kvstore.node.tier_mover import TierMover
from moonserve.kvstore.state.removals import MAX_REMOVALS, Removal, RemovalLog, ReportedRemoval
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.process.event_loop import BackgroundTasks

log = logging.getLogger(__name__)

LAST_CONTACT_FILE_NAME = "presence.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """An instant that can be compared across processes, reboots and clock changes as far as possible."""

    boot: str
    boot_s: float  # since boot, suspension included
    wall_s: float

    @classmethod
    def now(cls) -> "Timestamp":
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return cls(boot=boot, boot_s=time.clock_gettime(time.CLOCK_BOOTTIME), wall_s=time.time())

    def until(self, later: "Timestamp") -> float | None:
        """Returns the seconds until `later`; None if unknown: another boot, and the wall clock went back."""
        if self.boot and self.boot == later.boot:
            return max(later.boot_s - self.boot_s, 0.0)
        passed_s = later.wall_s - self.wall_s
        return passed_s if passed_s >= 0 else None


class LastContactFile:
    """File with the time of a node's last contact with its cluster, and its coverage of removals then."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LAST_CONTACT_FILE_NAME

    def read(self) -> tuple[Timestamp, float] | None:
        """Returns the last contact and coverage in seconds; None if the file is absent or unreadable."""
        try:
            entry = json.loads(self._path.read_text())
            return Timestamp(**entry["at"]), float(entry["covered_s"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, covered_s: float) -> None:
        """Replaces the file. Raises OSError. Not synced: an older file only means a longer absence."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"at": asdict(Timestamp.now()), "covered_s": covered_s}))
        os.replace(fresh, self._path)


REMOVALS_FILE_NAME = "removals"
_MAGIC = b"MSKVREM1"
_RECORD = struct.Struct("<16sQ36sdd")  # key, id, boot, seconds since boot, wall clock
_SUM = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size + _SUM.size


class RemovalFile:
    """Append-only file of removals. Blocking; to be used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / REMOVALS_FILE_NAME

    def load(self) -> list[ReportedRemoval]:
        """Returns all intact removals, with age 0 if it is unknown. Raises OSError."""
        if not self._path.exists():
            return []
        now = Timestamp.now()
        return [
            ReportedRemoval(key, removal_id, at.until(now) or 0.0)
            for key, removal_id, at in _records(self._path.read_bytes())
        ]

    def append(self, removals: Sequence[ReportedRemoval]) -> None:
        """Appends removals. Raises OSError."""
        with self._path.open("ab") as file:
            if not file.tell():
                file.write(_MAGIC)
            file.write(b"".join(_encoded(removals)))

    def rewrite(self, removals: Sequence[ReportedRemoval]) -> None:
        """Replaces the file by one with these removals. Raises OSError."""
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(_MAGIC + b"".join(_encoded(removals)))
        os.replace(fresh, self._path)


def _encoded(removals: Iterable[ReportedRemoval]) -> Iterator[bytes]:
    now = Timestamp.now()
    boot = now.boot.encode()
    for key, removal_id, age_s in removals:
        record = _RECORD.pack(key, removal_id, boot, now.boot_s - age_s, now.wall_s - age_s)
        yield record + _SUM.pack(xxh3_64_intdigest(record))


def _records(content: bytes) -> Iterator[tuple[BlockKey, int, Timestamp]]:
    if not content.startswith(_MAGIC):
        return
    for begin in range(len(_MAGIC), len(content) - RECORD_BYTES + 1, RECORD_BYTES):
        record = content[begin : begin + _RECORD.size]
        [expected] = _SUM.unpack_from(content, begin + _RECORD.size)
        if xxh3_64_intdigest(record) == expected:
            key, removal_id, boot, boot_s, wall_s = _RECORD.unpack(record)
            stamp = Timestamp(boot=boot.rstrip(b"\0").decode(), boot_s=boot_s, wall_s=wall_s)
            yield BlockKey(key), removal_id, stamp


T = TypeVar("T")

REWRITE_ABOVE = 2 * MAX_REMOVALS
"""Records in the file above which it is rewritten."""


class RemovalStore:
    """The removals of one node, in memory and on disk. Calls `changed` after removals. Belongs to one event loop."""

    def __init__(
        self,
        state: StoreState,
        mover: TierMover,
        removals: RemovalLog,
        folder: Path | None,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self.removals = removals
        self.settled = True
        """False while this node still has to learn missed removals from other nodes."""
        self.absent_s = 0.0
        """Time from the last contact in the previous life to this start; inf = unknown, 0 = no previous life."""
        self._state = state
        self._mover = mover
        self._clock = clock
        self._changed = changed
        self._file = RemovalFile(folder) if folder is not None else None
        self._presence = LastContactFile(folder) if folder is not None else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="removals")
        self._num_records = 0
        self._is_torn = False  # an append failed: the file must be rewritten
        self._covered_s = 0.0  # at the last contact in the previous life
        self._saving = BackgroundTasks()
        self._unsaved: dict[tuple[BlockKey, int], asyncio.Task[None]] = {}

    async def load(self, *, is_first_life: bool) -> None:
        """Loads the removals known in earlier lives. Call it before anything is removed or learned."""
        if self._file is None or self._presence is None:
            return
        seen_at, self._covered_s = await self._in_thread(self._presence.read) or (None, 0.0)
        passed_s = None if seen_at is None else seen_at.until(Timestamp.now())
        if not is_first_life:
            self.absent_s = math.inf if passed_s is None else passed_s
        try:
            kept = await self._in_thread(self._file.load)
        except OSError as error:
            log.error("the removals of earlier lives cannot be read: %s", error)
            kept = []
        self.removals.learn(kept, self._clock())
        self._is_torn = True  # the last record may be incomplete
        await self._write_records(())

    async def remove(self, keys: Sequence[BlockKey], removal_id: int) -> int:
        """Executes a removal of all replicas on this node, if it is new, and waits until it is saved. Returns how many
        objects it removed here, also if it was first learned from another node."""
        fresh = self.removals.execute(keys, removal_id, self._clock())
        removed = self._state.remove(fresh, corrupt=False)
        self.removals.mark_effective((about.key for about in removed), removal_id)
        self._changed()
        if fresh:
            generations = dict.fromkeys(fresh, self._state.catalog.latest_generation)
            self._save(generations, [ReportedRemoval(key, removal_id, 0.0) for key in fresh])
        await self._until_saved({(key, removal_id) for key in keys})
        return self.removals.num_effective(keys, removal_id)

    async def learn(self, heard: Iterable[ReportedRemoval]) -> int:
        """Executes removals learned from another node. Returns how many objects were removed here. Does not wait for
        the disk, whose recovery may itself wait for the caller; see `is_saved`."""
        fresh = self.removals.learn(heard, self._clock())
        if not fresh:
            return 0
        bounds = self._bounds(fresh)
        removed = self._state.remove_before(bounds)
        self._state.counters["objects_outdated"] += len(removed)
        self._credit_removals(fresh, removed)
        self._changed()
        now = self._clock()
        self._save(
            self._last_gone_generations(bounds), [ReportedRemoval(r.key, r.removal_id, now - r.at) for r in fresh]
        )
        return len(removed)

    def _credit_removals(self, fresh: Iterable[Removal], removed: Iterable[DiskObject]) -> None:
        """Credits removed objects to the removals of their keys; to all of them if a key has several."""
        taken = {about.key for about in removed}
        for removal in fresh:
            if removal.key in taken:
                self.removals.mark_effective((removal.key,), removal.removal_id)

    def drop(self, outdated: Sequence[DiskObject]) -> None:
        """Removes objects that have another value elsewhere, or may have been removed without this node knowing."""
        bounds = {about.key: about.generation + 1 for about in outdated}
        removed = self._state.remove_before(bounds)
        self._state.counters["objects_outdated"] += len(removed)
        self._changed()
        self._save({key: bound - 1 for key, bound in bounds.items()}, ())

    def extend_coverage(self, covered_s: float) -> None:
        """Extends coverage: this node learned all that a node with this coverage knows. Earlier knowledge counts."""
        self.removals.extend_coverage(covered_s, self._clock())

    def limit_coverage(self, covered_s: float) -> None:
        """Limits coverage to `covered_s`: earlier removals may have been missed."""
        self.removals.limit_coverage(covered_s, self._clock())

    def restore_coverage(self) -> None:
        """Restores the previous life's coverage: no removal was missed since then."""
        if self.absent_s < math.inf:
            self.removals.extend_coverage(self._covered_s + self.absent_s, self._clock())

    @property
    def is_saved(self) -> bool:
        """False while a removed object might return after a restart."""
        return not self._saving

    @property
    def disk_is_recovered(self) -> bool:
        """True if recovery has found all objects on disk and tried to make the disk forget those that may not stay."""
        return self._mover.recovered == 1.0

    async def save_contact(self) -> None:
        """Saves that this node is in touch with its cluster. Learned removals must be saved: none is resent."""
        self.removals.expire(self._clock())
        if self._presence is None:
            return
        covered_s = self.removals.covered_s(self._clock())
        presence = self._presence
        try:
            await self._in_thread(lambda: presence.write(covered_s))
        except OSError as error:
            log.debug("the time of the last contact cannot be saved: %s", error)

    async def close(self) -> None:
        """Waits for saves in flight. Call it once the disk's recovery has ended."""
        await asyncio.gather(*self._saving)
        await asyncio.to_thread(self._thread.shutdown)

    def _bounds(self, removals: Iterable[Removal]) -> dict[BlockKey, int]:
        """Returns a bound per key: generations below it were there when the key was removed."""
        bounds: dict[BlockKey, int] = {}
        for removal in removals:
            bound = self._state.reserved_before(removal.at)
            bounds[removal.key] = max(bound, bounds.get(removal.key, 0))
        return bounds

    def _last_gone_generations(self, keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Returns, by key, the last generation that is gone here. It is later than the removal's bound: a copy made
        since then of a removed value has a later generation, even if it was evicted and is left on disk only."""
        found = {key: self._state.catalog.find(key) for key in keys}
        latest = self._state.catalog.latest_generation
        return {key: stored.generation - 1 if stored else latest for key, stored in found.items()}

    def _save(self, generations: dict[BlockKey, int], records: Sequence[ReportedRemoval]) -> None:
        """Starts a save, which goes on if its caller is cancelled."""
        self._mover.drop_in_recovery(generations)
        saving = self._saving.start(self._forget_and_write(generations, records))
        for key, removal_id, _ in records:
            self._unsaved[key, removal_id] = saving

    async def _forget_and_write(self, generations: dict[BlockKey, int], records: Sequence[ReportedRemoval]) -> None:
        """Saves a removal: first the disk forgets the objects, then the record is written. In the other order, after a
        crash in between, the object would return and a repeated removal would be ignored as already executed."""
        if generations and not await self._mover.forget(generations):
            self._state.counters["removals_unsaved"] += len(generations)
        for key, removal_id, _ in records:
            del self._unsaved[key, removal_id]
        await self._write_records(records)

    async def _until_saved(self, removals: Iterable[tuple[BlockKey, int]]) -> None:
        """Waits until these removals are saved, whichever call started the save."""
        waits = {self._unsaved[each] for each in removals if each in self._unsaved}
        await asyncio.gather(*map(asyncio.shield, waits))

    async def _write_records(self, records: Sequence[ReportedRemoval]) -> None:
        if self._file is None:
            return
        file, rewrite = self._file, self._is_torn or self._num_records > REWRITE_ABOVE
        if not records and not rewrite:
            return
        if rewrite:
            now = self._clock()
            records = [
                ReportedRemoval(r.key, r.removal_id, now - r.at)
                for r in self.removals.all()
                if (r.key, r.removal_id) not in self._unsaved
            ]
            self._num_records = 0
        write = file.rewrite if rewrite else file.append
        try:
            await self._in_thread(lambda: write(records))
            if rewrite:  # only a rewrite repairs a torn file
                self._is_torn = False
            self._num_records += len(records)
        except OSError as error:
            self._is_torn = True
            log.warning("removals cannot be saved in the folder: %s", error)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
