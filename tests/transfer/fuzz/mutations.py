"""From a seed to bytes that are almost a session. Pure."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, replace
from enum import IntEnum

import xxhash

from transfer.tcp.frames import Header, Kind, encode

INTERESTING = (
    *(0, 1, 2, 7, 8, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1, 1 << 31),
    *(1 << 32, 1 << 40, (1 << 40) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
_FIELDS = ("segment_id", "window_id", "source_id", "nbytes", "checksum")


class Passed(IntEnum):
    """Which descriptor goes with a frame."""

    NONE = 0
    MEMORY = 1
    UNSEALED = 2
    NO_MEMORY = 3


@dataclass(frozen=True)
class Frame:
    header: Header
    rows: tuple[tuple[int, ...], ...] = ()
    payload: bytes = b""
    passed: Passed = Passed.NONE

    @property
    def data(self) -> bytes:
        """Sealed as it should be, whatever it says: lies that are well signed get further."""
        frame = encode(self.header) + b"".join(struct.pack("<qqq", *row) for row in self.rows)
        if self.header.kind in (Kind.READ, Kind.WRITE):
            frame += xxhash.xxh3_64_digest(frame)
        return frame + self.payload


@dataclass(frozen=True)
class Ground:
    """What honest frames would speak of."""

    segment_id: int
    hidden_id: int
    window_id: int
    nbytes: int
    window_start: int
    window_nbytes: int
    base: int
    """Of memory of the initiator's that may be offered by address."""


class Inventor:
    """Invents one session."""

    def __init__(self, seed: int, ground: Ground, *, near: bool) -> None:
        self.rng = random.Random(seed)
        self.ground = ground
        self.near = near
        """Over shared memory, where more can be said."""

    def session(self) -> list[tuple[bytes, Passed]]:
        kinds = [Kind.READ, Kind.WRITE, self.rng.choice(list(Kind))]
        if self.near:
            kinds += [Kind.OFFER, Kind.MAP, *[Kind.WRITE_FROM] * 3]
        frames = [
            self._bent(self._honest(self.rng.choice(kinds))) for _ in range(self.rng.randint(1, 6))
        ]
        if self.near and self.rng.random() < 0.7:
            frames.insert(0, replace(self._honest(Kind.OFFER, 1), passed=Passed.MEMORY))
        said = [(frame.data, frame.passed) for frame in frames]
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, 5))):
            at = self.rng.randrange(len(said))
            said[at] = (mutated(self.rng, said[at][0]), said[at][1])
            if self.rng.random() < 0.1:
                said.insert(at, said[at])
        return said

    def _honest(self, kind: Kind, source_id: int = 0) -> Frame:
        ground, rng = self.ground, self.rng
        source_id = source_id or rng.choice((1, 1, 1, 1, 2, 3, 4))
        header = Header(kind=kind, segment_id=ground.segment_id, source_id=source_id)
        match kind:
            case Kind.READ | Kind.MAP:
                segment_id = rng.choice((ground.segment_id, ground.hidden_id))
                rows = self._rows(ground.nbytes, 0) if kind is Kind.READ else ()
                return Frame(header._replace(segment_id=segment_id, entries=len(rows)), rows)
            case Kind.WRITE | Kind.WRITE_FROM:
                rows = self._rows(ground.window_nbytes, ground.window_start)
                header = header._replace(window_id=ground.window_id, entries=len(rows))
                if kind is Kind.WRITE_FROM:
                    return Frame(header, rows)
                nbytes = sum(length for _, _, length in rows)
                payload = rng.randbytes(min(max(nbytes, 0), 1 << 18))
                checksum = xxhash.xxh3_64_intdigest(payload)
                header = header._replace(nbytes=nbytes % (1 << 64), checksum=checksum)
                return Frame(header, rows, payload)
            case Kind.OFFER:
                base = rng.choice((0, ground.base))
                header = header._replace(window_id=base, nbytes=ground.nbytes)
                return Frame(header, passed=rng.choice((Passed.MEMORY, Passed.MEMORY, *Passed)))
        return Frame(header._replace(source_id=rng.getrandbits(63)))

    def _rows(self, nbytes: int, start: int) -> tuple[tuple[int, ...], ...]:
        rows = []
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 5))):
            length = self.rng.randint(0, min(nbytes, 8192))
            row = [start + self.rng.randint(0, nbytes - length), self.rng.randint(0, 4096), length]
            if self.rng.random() < 0.15:
                row[self.rng.choice((0, 0, 1, 2))] = self._number(row[0])
            rows.append(tuple(row))
        return tuple(rows)

    def _bent(self, frame: Frame) -> Frame:
        """With a field that lies, now and then."""
        header, rng = frame.header, self.rng
        if rng.random() > 0.25:
            return frame
        if rng.random() < 0.2:
            entries = rng.choice((0, 1, 2, 4096, 4097, 1 << 20))
            return replace(frame, header=header._replace(entries=entries))
        field = rng.choice(_FIELDS)
        number = self._number(int(getattr(header, field))) % (1 << 64)
        return replace(frame, header=header._replace(**{field: number}))

    def _number(self, near: int) -> int:
        """An int64 that is likely to be at some edge."""
        number = self.rng.choice(INTERESTING)
        number = self.rng.choice((number, -number, near + number, near - number, -1, -4096))
        return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A byte or a number changed, a piece cut out, doubled, or put in."""
    changed = bytearray(data)
    at = rng.randrange(len(changed) + 1)
    match rng.randrange(6):
        case 0 if at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(changed):
            changed[at] = rng.randrange(256)
        case 2:
            del changed[at : at + rng.randint(1, 64)]
        case 3:
            changed[at:at] = rng.randbytes(rng.randint(1, 64))
        case 4:
            changed[at:at] = changed[at : at + rng.randint(1, 64)]
        case _:
            changed[at : at + 8] = struct.pack("<Q", rng.choice(INTERESTING))
    return bytes(changed)
