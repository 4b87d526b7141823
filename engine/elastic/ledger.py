"""One budget of memory among the workers of a host: a file that they all map, with a row for each.

    header: what the file is, the budget
    row:    whose it is, floor, ceiling, held, spare, wanted, and until when those two count; bytes, monotonic seconds

Its rules: a row is its owner's to write, and counts while that process lives, which the kernel knows: it holds a lock
on the row's byte of the file, which ends with it. So a dead worker's share is free at once. Whoever takes memory
looks at all rows and changes its own under one lock; giving back needs none. A process that was stopped inside of
that lock holds up nobody who serves: others find no memory for as long. Only who starts waits for it, half a minute.
Linux ≥ 3.15.

`Budget` decides how much each may have, by pure arithmetic. Its rule: nothing is given to a worker if the others'
floors could then no longer be met, nor beyond its ceiling. While a worker waits, one that holds more than it gets
nothing beyond its own floor, so that nobody starves (max-min). Does not know pages or blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError


@dataclass(slots=True, kw_only=True, eq=False)
class Share:
    """One living worker's part, in bytes."""

    number: int = 0  # of its row
    name: str = ""
    floor: int  # always to be had
    ceiling: int  # never exceeded by what is given; what is held may be more after it was lowered
    held: int = 0  # mapped, or about to be
    empty: int = 0  # of those, what could be given back at once without preempting anybody
    wanted: int = 0  # what it waits for, beyond what it holds

    @property
    def unmet(self) -> int:
        """What the floor promises and the worker does not hold yet."""
        return max(0, self.floor - self.held)

    @property
    def spare(self) -> int:
        """Empty bytes above the floor: whoever needs them may take them."""
        return max(0, min(self.empty, self.held - self.floor))


class Budget:
    """`nbytes` among the shares, which are seen while they change: they need not fit together."""

    def __init__(self, nbytes: int, shares: Iterable[Share]) -> None:
        self.nbytes = nbytes
        self._shares = list(shares)

    @property
    def free(self) -> int:
        """Held by nobody; negative while more is held than there should be (`resize`)."""
        return self.nbytes - sum(share.held for share in self._shares)

    def most(self, share: Share) -> int:
        """What the worker could ever hold as the figures are."""
        floors = sum(other.floor for other in self._others(share))
        return min(share.ceiling, self.nbytes - floors)

    def room(self, share: Share) -> int:
        """What the worker may take now, others' empty bytes included."""
        return self._room(share, self.free + sum(other.spare for other in self._others(share)))

    def room_untouched(self, share: Share) -> int:
        """What it may take without anybody giving any back."""
        return self._room(share, self.free)

    def _room(self, share: Share, within_reach: int) -> int:
        others = self._others(share)
        holds_most = any(self.lacking(each) and share.held > each.held for each in others)
        owed = sum(each.unmet for each in others)  # what the others' floors still need
        beyond = 0 if holds_most else within_reach - owed
        room = max(beyond, min(within_reach, share.unmet))
        return max(0, min(room, share.ceiling - share.held))

    def lacking(self, share: Share) -> int:
        """What the worker waits for and may come to hold."""
        return max(0, min(share.wanted, self.most(share) - share.held)) if share.wanted else 0

    def spare_asked(self, share: Share) -> int:
        """Bytes above its floor that this worker should give, if nothing in use lies in them: what another lacks and
        cannot take now, or what is held too much. Who lacks some itself gives only to who holds less, until both hold
        alike."""
        asked = -self.free
        for other in self._others(share):
            missing = self.lacking(other) - self.room_untouched(other)
            if self.lacking(share):
                missing = min(missing, (share.held - other.held) // 2)
            asked = max(asked, missing)
        return max(0, min(asked, share.held - share.floor))

    def _others(self, share: Share) -> list[Share]:
        return [other for other in self._shares if other is not share]


MAGIC = b"moonserve-kv-1\0\0"
NUM_ROWS = 64
NAME_BYTES = 40
WISH_S = 2.0
"""A wish that is not repeated for so long counts no more: who waits repeats it every half second."""
SPARE_S = 3.0
"""Likewise what can be spared, which is said every second: nobody waits for what a process that was stopped has."""
_HEADER = struct.Struct(f"<{len(MAGIC)}sQ")
_ROW = struct.Struct(f"<{NAME_BYTES}sQQQQQdd")
_ROW_BYTES = 128
_FIELDS_AT = NAME_BYTES  # floor, ceiling, held, spare, wanted, until when wanted, and spare
_FILE_BYTES = _ROW_BYTES * (1 + NUM_ROWS)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.001
_START_TRIES = 30_000
"""Of who starts: on a busy machine a holder may have to wait for its turn, and that is no reason not to start."""


class Ledger:
    """The file as one process sees it."""

    def __init__(self, path: Path, *, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes the file where there is none. The budget is the one in the file while anybody lives in it. Raises
        ConfigError."""
        if budget < 1:
            raise ConfigError(f"a budget of {budget} bytes for KV is none")
        self.path = path
        self._clock = clock
        self._own: set[int] = set()  # rows
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self._locked(_START_TRIES) as is_locked:
                if not is_locked:
                    raise ConfigError(f"{path} is locked for too long")
                self._begin(budget)
        except OSError as error:
            raise ConfigError(f"{path} cannot hold the workers' shares: {error}") from error

    def _begin(self, budget: int) -> None:
        if os.fstat(self._fd).st_size < _FILE_BYTES:
            # First: who is killed in between leaves a file that is too short, and is made again.
            os.pwrite(self._fd, MAGIC, 0)
            # All of it now: a page that a full disk has no room for ends whoever writes to it by SIGBUS.
            os.posix_fallocate(self._fd, 0, _FILE_BYTES)
        self._map = mmap.mmap(self._fd, _FILE_BYTES)
        if self._map[: len(MAGIC)] != MAGIC:
            raise ConfigError(f"{self.path} is another kind of file")
        if not self.rows():
            self._write(0, _HEADER.pack(MAGIC, budget))

    @property
    def budget(self) -> int:
        budget: int = _HEADER.unpack_from(self._map)[1]
        return budget

    def resize(self, budget: int) -> None:
        """Another budget from now on; what is held beyond it is asked back. Raises ConfigError when it does not hold
        all floors, or the lock is not to be had."""
        with self._locked() as is_locked:
            floors = sum(row.floor for row in self.rows())
            if not is_locked or budget < max(1, floors):
                raise ConfigError(f"a budget of {budget} bytes, where all floors are {floors}")
            self._write(0, _HEADER.pack(MAGIC, budget))

    def rows(self) -> list[Share]:
        """Of the living."""
        found = []
        now = self._clock()
        for number in range(NUM_ROWS):
            if not self._map[_place(number)] or not self._is_alive(number):
                continue
            name, floor, ceiling, held, empty, wanted, wanted_until, empty_until = _ROW.unpack_from(
                self._map, _place(number)
            )
            share = Share(
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
        """The number of a row that is this process's from now on. Raises ConfigError when floors do not fit, or all
        rows are taken."""
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
        """Raises ConfigError for a floor that does not fit beside the others'."""
        with self._locked() as is_locked:
            self._require_fit(floor, ceiling, [r for r in self.rows() if r.number != number])
            if not is_locked:
                raise ConfigError(f"{self.path} is locked for too long")
            self._write(_place(number) + _FIELDS_AT, struct.pack("<QQ", floor, ceiling))

    def take(self, number: int, count: int, unit: int) -> int:
        """At most `count` times `unit` bytes more for this row; how often, now."""
        with self._locked() as is_locked:
            if not is_locked:
                return 0
            own, budget = self.share_of(number)
            taken = min(count, budget.room_untouched(own) // unit)
            self._set(number, 2, own.held + taken * unit)
            return taken

    def give(self, number: int, nbytes: int) -> None:
        """Its own row's alone, and less: needs no lock."""
        self._set(number, 2, self._get(number, 2) - nbytes)

    def spare(self, number: int, nbytes: int) -> None:
        """For a while (SPARE_S)."""
        self._set(number, 3, nbytes)
        until = self._clock() + SPARE_S
        self._write(_place(number) + _FIELDS_AT + 48, struct.pack("<d", until))

    def want(self, number: int, nbytes: int) -> None:
        """For a while (WISH_S)."""
        until = self._clock() + WISH_S
        self._write(_place(number) + _FIELDS_AT + 32, struct.pack("<Qd", nbytes, until))

    def share_of(self, number: int) -> tuple[Share, Budget]:
        """The row, and the budget among it and all others."""
        rows = self.rows()
        own = next(row for row in rows if row.number == number)
        return own, Budget(self.budget, rows)

    def _require_fit(self, floor: int, ceiling: int, others: Iterable[Share]) -> None:
        """Raises ConfigError for figures that could never be kept."""
        floors = floor + sum(other.floor for other in others)
        if not 0 <= floor <= ceiling or floors > self.budget:
            raise ConfigError(
                f"a floor of {floor} bytes and a ceiling of {ceiling}: all floors together are {floors} of a budget of "
                f"{self.budget}"
            )

    @property
    def identity(self) -> str:
        """The same for all who share it, whatever they call the file."""
        status = os.fstat(self._fd)
        return f"{status.st_dev:x}-{status.st_ino:x}"

    def close(self) -> None:
        """Its rows are nobody's from now on."""
        self._map.close()
        os.close(self._fd)

    # -- bytes and locks

    def _get(self, number: int, field: int) -> int:
        value: int = struct.unpack_from("<Q", self._map, _place(number) + _FIELDS_AT + 8 * field)[0]
        return value

    def _set(self, number: int, field: int, value: int) -> None:
        self._write(_place(number) + _FIELDS_AT + 8 * field, struct.pack("<Q", value))

    def _write(self, place: int, data: bytes) -> None:
        """At once, since others look without the lock: `struct.pack_into` would write zeros first."""
        self._map[place : place + len(data)] = data

    @contextlib.contextmanager
    def _locked(self, tries: int = _LOCK_TRIES) -> Iterator[bool]:
        """Whether it was to be had; given up by who serves soon, since its holder may have been stopped."""
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
        """Until this process ends. Locks of this kind belong to the open file, and are told apart from flock's."""
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
