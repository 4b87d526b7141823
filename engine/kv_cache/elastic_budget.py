"""Shared memory budget of the workers of a host: a file that all of them map, with one row per worker.

    header: magic, budget
    row:    name, floor, ceiling, held, empty, wanted in bytes; monotonic seconds at which wanted and empty expire

Only the owner writes a row. The row counts while the owner lives: the owner holds a lock on the row's byte of the file,
which the kernel releases when the process ends, so a dead worker's share is free at once. A worker that takes memory
reads all rows and changes its own under one lock; giving memory back needs no lock. If a process is stopped while it
holds the lock, running workers do not wait but find no memory meanwhile. Only a starting worker waits for the lock, for
30 seconds. Needs Linux 3.15.

`Budget` computes how much each worker may have. Its rule: a worker gets nothing if the others' floors could then no
longer be met, and nothing above its ceiling. While one worker waits, workers that hold more get nothing above their
own floors, so that none starves (max-min). Does not know pages or blocks.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moonserve.protocol.errors import ConfigError


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerShare:
    """Row of one living worker; sizes in bytes."""

    number: int = 0  # of the row
    name: str = ""
    floor: int  # guaranteed
    ceiling: int  # never exceeded by new grants; `held` may exceed it after it was lowered
    held: int = 0  # mapped, or about to be
    empty: int = 0  # part of `held` that can be given back without a preemption
    wanted: int = 0  # requested beyond `held`

    @property
    def unmet(self) -> int:
        """Bytes of the floor that the worker does not hold yet."""
        return max(0, self.floor - self.held)

    @property
    def spare(self) -> int:
        """Empty bytes above the floor, which other workers may take."""
        return max(0, min(self.empty, self.held - self.floor))


class Budget:
    """Division of `nbytes` among shares. Shares are read while they change, so they may be inconsistent."""

    def __init__(self, nbytes: int, shares: Iterable[WorkerShare]) -> None:
        self.nbytes = nbytes
        self._shares = list(shares)

    @property
    def free(self) -> int:
        """Bytes that no worker holds; negative while more is held than the budget (after `resize`)."""
        return self.nbytes - sum(share.held for share in self._shares)

    def max_bytes(self, share: WorkerShare) -> int:
        """Returns the bytes that the worker could hold at most under the current floors."""
        floors = sum(other.floor for other in self._others(share))
        return min(share.ceiling, self.nbytes - floors)

    def available_bytes(self, share: WorkerShare) -> int:
        """Returns the bytes that the worker may take now, including others' spare bytes."""
        return self._room(share, self.free + sum(other.spare for other in self._others(share)))

    def free_bytes_for(self, share: WorkerShare) -> int:
        """Returns the bytes that the worker may take without others giving any back."""
        return self._room(share, self.free)

    def _room(self, share: WorkerShare, within_reach: int) -> int:
        others = self._others(share)
        holds_most = any(self.missing_bytes(each) and share.held > each.held for each in others)
        owed = sum(each.unmet for each in others)
        beyond = 0 if holds_most else within_reach - owed
        room = max(beyond, min(within_reach, share.unmet))
        return max(0, min(room, share.ceiling - share.held))

    def missing_bytes(self, share: WorkerShare) -> int:
        """Returns the bytes that the worker waits for and could be given."""
        return max(0, min(share.wanted, self.max_bytes(share) - share.held)) if share.wanted else 0

    def bytes_requested(self, share: WorkerShare) -> int:
        """Returns the bytes above its floor that this worker should give back, if they are not in use: the bytes that
        another worker lacks and cannot take now, or the excess over the budget. A worker that lacks bytes itself gives
        only to a worker that holds less, until both hold the same."""
        asked = -self.free
        for other in self._others(share):
            missing = self.missing_bytes(other) - self.free_bytes_for(other)
            if self.missing_bytes(share):
                missing = min(missing, (share.held - other.held) // 2)
            asked = max(asked, missing)
        return max(0, min(asked, share.held - share.floor))

    def _others(self, share: WorkerShare) -> list[WorkerShare]:
        return [other for other in self._shares if other is not share]


MAGIC = b"moonserve-kv-1\0\0"
NUM_ROWS = 64
NAME_BYTES = 40
WANTED_TTL_S = 2.0
"""Lifetime of `wanted`. A waiting worker repeats it every half second."""
EMPTY_TTL_S = 3.0
"""Lifetime of `empty`, repeated every second, so that no worker waits for memory of a stopped process."""
_HEADER = struct.Struct(f"<{len(MAGIC)}sQ")
_ROW = struct.Struct(f"<{NAME_BYTES}sQQQQQdd")
_ROW_BYTES = 128
_FIELDS_AT = NAME_BYTES  # floor, ceiling, held, empty, wanted, expiry of wanted, expiry of empty
_FILE_BYTES = _ROW_BYTES * (1 + NUM_ROWS)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.001
_START_TRIES = 30_000
"""Tries of a starting worker: on a busy machine the holder of the lock may have to wait for the processor."""


class Ledger:
    """Access of one process to the ledger file."""

    def __init__(self, path: Path, *, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens or creates the file. Its budget is kept if a living worker has a row. Raises ConfigError."""
        if budget < 1:
            raise ConfigError(f"the budget of KV must be at least 1 byte, not {budget}")
        self.path = path
        self._clock = clock
        self._own: set[int] = set()  # numbers of own rows
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self._locked(_START_TRIES) as is_locked:
                if not is_locked:
                    raise ConfigError(f"{path} has been locked by another process for too long; end that process")
                self._begin(budget)
        except OSError as error:
            raise ConfigError(f"{path} cannot be used as --kv-memory-ledger: {error}") from error

    def _begin(self, budget: int) -> None:
        if os.fstat(self._fd).st_size < _FILE_BYTES:
            # The magic is written first: if the process is killed here, the file is too short and is initialised again.
            os.pwrite(self._fd, MAGIC, 0)
            # All pages are allocated now: on a full disk, writing to a missing page ends the process with SIGBUS.
            os.posix_fallocate(self._fd, 0, _FILE_BYTES)
        self._map = mmap.mmap(self._fd, _FILE_BYTES)
        if self._map[: len(MAGIC)] != MAGIC:
            raise ConfigError(f"{self.path} is not a ledger of KV memory; name another --kv-memory-ledger")
        if not self.rows():
            self._write(0, _HEADER.pack(MAGIC, budget))

    @property
    def budget(self) -> int:
        budget: int = _HEADER.unpack_from(self._map)[1]
        return budget

    def resize(self, budget: int) -> None:
        """Changes the budget; memory held beyond it is requested back. Raises ConfigError if the budget is below the
        sum of all floors, or the lock is not available."""
        with self._locked() as is_locked:
            floors = sum(row.floor for row in self.rows())
            if not is_locked or budget < max(1, floors):
                raise ConfigError(f"a budget of {budget} bytes is below the sum of all floors, {floors} bytes")
            self._write(0, _HEADER.pack(MAGIC, budget))

    def rows(self) -> list[WorkerShare]:
        """Returns the rows of living workers."""
        found = []
        now = self._clock()
        for number in range(NUM_ROWS):
            if not self._map[_place(number)] or not self._is_alive(number):
                continue
            name, floor, ceiling, held, empty, wanted, wanted_until, empty_until = _ROW.unpack_from(
                self._map, _place(number)
            )
            share = WorkerShare(
                number=number,
                name=name.rstrip(b"\0").decode(errors="replace"),
                floor=floor,
                ceiling=ceiling,
                held=held,
                empty=min(empty, held) if empty_until > now else 0,
                wanted=wanted if wanted_until > now else 0,
            )
            found.append(share)
        return found

    def claim(self, name: str, floor: int, ceiling: int) -> int:
        """Takes a free row for this process and returns its number. Raises ConfigError if the floors do not fit, all
        rows are taken, or the lock is not available."""
        with self._locked(_START_TRIES) as is_locked:
            rows = self.rows()
            self._require_fit(floor, ceiling, rows)
            taken = {row.number for row in rows}
            number = next((n for n in range(NUM_ROWS) if n not in taken), None)
            if number is None or not is_locked or not self._keep_alive(number):
                raise ConfigError(f"{self.path} has no row left for {name}")
            self._own.add(number)
            label = name.encode()[: NAME_BYTES - 1]
            row = _ROW.pack(label, floor, ceiling, 0, 0, 0, 0.0, 0.0)
            self._write(_place(number), row)
        return number

    def limit(self, number: int, floor: int, ceiling: int) -> None:
        """Changes a row's floor and ceiling. Raises ConfigError if the floor does not fit with the others' floors."""
        with self._locked() as is_locked:
            self._require_fit(floor, ceiling, [r for r in self.rows() if r.number != number])
            if not is_locked:
                raise ConfigError(f"{self.path} has been locked by another process for too long; end that process")
            self._write(_place(number) + _FIELDS_AT, struct.pack("<QQ", floor, ceiling))

    def take(self, number: int, count: int, unit: int) -> int:
        """Takes up to `count` units of `unit` bytes for this row and returns how many it got."""
        with self._locked() as is_locked:
            if not is_locked:
                return 0
            own, budget = self.share_of(number)
            taken = min(count, budget.free_bytes_for(own) // unit)
            self._set(number, 2, own.held + taken * unit)
            return taken

    def give(self, number: int, nbytes: int) -> None:
        """Gives back bytes of this row. Needs no lock: only the owner writes the row, and `held` only shrinks."""
        self._set(number, 2, self._get(number, 2) - nbytes)

    def set_empty(self, number: int, nbytes: int) -> None:
        """Sets `empty` of this row; it expires after EMPTY_TTL_S."""
        self._set(number, 3, nbytes)
        until = self._clock() + EMPTY_TTL_S
        self._write(_place(number) + _FIELDS_AT + 48, struct.pack("<d", until))

    def set_wanted(self, number: int, nbytes: int) -> None:
        """Sets `wanted` of this row; it expires after WANTED_TTL_S."""
        until = self._clock() + WANTED_TTL_S
        self._write(_place(number) + _FIELDS_AT + 32, struct.pack("<Qd", nbytes, until))

    def share_of(self, number: int) -> tuple[WorkerShare, Budget]:
        """Returns this row, and the budget over all living rows."""
        rows = self.rows()
        own = next(row for row in rows if row.number == number)
        return own, Budget(self.budget, rows)

    def _require_fit(self, floor: int, ceiling: int, others: Iterable[WorkerShare]) -> None:
        """Raises ConfigError for a floor or ceiling that could never be kept."""
        floors = floor + sum(other.floor for other in others)
        if not 0 <= floor <= ceiling or floors > self.budget:
            raise ConfigError(
                f"a floor of {floor} bytes and a ceiling of {ceiling}: all floors together are {floors} of a budget of "
                f"{self.budget}"
            )

    @property
    def identity(self) -> str:
        """Identifier of the file, equal for all workers that share it, whatever path they use."""
        status = os.fstat(self._fd)
        return f"{status.st_dev:x}-{status.st_ino:x}"

    def close(self) -> None:
        """Closes the file and so frees this process's rows."""
        self._map.close()
        os.close(self._fd)

    # -- bytes and locks

    def _get(self, number: int, field: int) -> int:
        value: int = struct.unpack_from("<Q", self._map, _place(number) + _FIELDS_AT + 8 * field)[0]
        return value

    def _set(self, number: int, field: int, value: int) -> None:
        self._write(_place(number) + _FIELDS_AT + 8 * field, struct.pack("<Q", value))

    def _write(self, place: int, data: bytes) -> None:
        """Writes in one assignment, since others read without the lock; `struct.pack_into` would write zeros first."""
        self._map[place : place + len(data)] = data

    @contextlib.contextmanager
    def _locked(self, tries: int = _LOCK_TRIES) -> Iterator[bool]:
        """Takes the file lock and yields True, or yields False after `tries`. A running worker gives up soon, since the
        holder may have been stopped."""
        for _ in range(tries):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
                continue
            try:
                yield True
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            return
        yield False

    def _keep_alive(self, number: int) -> bool:
        """Locks a row's byte until the file is closed or the process ends; returns False if another process has it.
        Open file description locks are independent of flock."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _byte(number))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_alive(self, number: int) -> bool:
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _byte(number))
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK or number in self._own


def _byte(number: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)


def _place(number: int) -> int:
    return _ROW_BYTES * (1 + number)
