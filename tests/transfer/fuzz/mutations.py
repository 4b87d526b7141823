"""From a seed to bytes that are almost a session. Pure."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from transfer.wire.frames import Header, Kind, decode, encode

INTERESTING = (
    *(0, 1, 2, 7, 8, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1, 1 << 31),
    *(1 << 32, 1 << 40, (1 << 40) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)


class Passed(IntEnum):
    """Which descriptor goes with a frame."""

    NONE = 0
    MEMORY = 1
    UNSEALED = 2
    NO_MEMORY = 3


@dataclass(frozen=True)
class Frame:
    data: bytes
    passed: Passed = Passed.NONE


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

    def session(self) -> list[Frame]:
        frames = [self.frame() for _ in range(self.rng.randint(1, 6))]
        if self.near and self.rng.random() < 0.7:
            frames.insert(0, self._honest_offer(self.rng.random() < 0.5))
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, 5))):
            self._mutate_one(frames)
        return frames

    def frame(self) -> Frame:
        kinds = [self._read, self._write, self._plain]
        if self.near:
            kinds += [self._offer, self._map, self._write_from, self._write_from, self._write_from]
        return self.rng.choice(kinds)()

    def _read(self) -> Frame:
        rows = self._rows(self.ground.nbytes, 0)
        segment_id = self.rng.choice((self.ground.segment_id, self.ground.hidden_id))
        return self._sealed(Header(kind=Kind.READ, entries=len(rows), segment_id=segment_id), rows)

    def _write(self) -> Frame:
        rows = self._rows(self.ground.window_nbytes, self.ground.window_start)
        nbytes = sum(length for _, _, length in rows)
        payload = self.rng.randbytes(min(max(nbytes, 0), 1 << 18))
        header = Header(
            kind=Kind.WRITE,
            entries=len(rows),
            segment_id=self.ground.segment_id,
            window_id=self.ground.window_id,
            nbytes=nbytes % (1 << 64),
            checksum=xxhash.xxh3_64_intdigest(payload),
        )
        frame = self._sealed(header, rows)
        return Frame(frame.data + payload)

    def _plain(self) -> Frame:
        kind = self.rng.choice(list(Kind))
        return Frame(encode(self._bent(Header(kind=kind, source_id=self.rng.getrandbits(63)))))

    def _honest_offer(self, by_address: bool, source_id: int = 1) -> Frame:
        header = Header(
            kind=Kind.OFFER,
            source_id=source_id,
            window_id=self.ground.base if by_address else 0,
            nbytes=self.ground.nbytes,
        )
        return Frame(encode(header), Passed.MEMORY)

    def _offer(self) -> Frame:
        honest = self._honest_offer(self.rng.random() < 0.5, self.rng.randint(1, 4))
        passed = self.rng.choice((Passed.MEMORY, Passed.MEMORY, *Passed))
        return Frame(encode(self._bent(decode(honest.data))), passed)

    def _write_from(self) -> Frame:
        rows = self._rows(self.ground.window_nbytes, self.ground.window_start)
        header = Header(
            kind=Kind.WRITE_FROM,
            entries=len(rows),
            segment_id=self.ground.segment_id,
            window_id=self.ground.window_id,
            source_id=self.rng.choice((1, 1, 1, 1, 2, 3)),
        )
        return Frame(encode(self._bent(header)) + _packed(rows))

    def _map(self) -> Frame:
        segment_id = self.rng.choice((self.ground.segment_id, self.ground.hidden_id))
        return Frame(encode(self._bent(Header(kind=Kind.MAP, segment_id=segment_id))))

    def _rows(self, nbytes: int, start: int) -> list[tuple[int, int, int]]:
        rows = []
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 5))):
            length = self.rng.randint(0, min(nbytes, 8192))
            offset = start + self.rng.randint(0, nbytes - length)
            row = [offset, self.rng.randint(0, 4096), length]
            if self.rng.random() < 0.15:
                row[self.rng.choice((0, 0, 1, 2))] = self._number(offset)
            rows.append((row[0], row[1], row[2]))
        return rows

    def _number(self, near: int) -> int:
        """An int64 that is likely to be at some edge."""
        number = self.rng.choice(INTERESTING)
        number = self.rng.choice((number, -number, near + number, near - number, -1, -4096))
        return (number + (1 << 63)) % (1 << 64) - (1 << 63)

    def _bent(self, header: Header) -> Header:
        """With a field that lies, now and then."""
        if self.rng.random() > 0.25:
            return header
        field = self.rng.choice(("segment_id", "window_id", "source_id", "nbytes", "checksum"))
        if self.rng.random() < 0.2:
            return header._replace(entries=self.rng.choice((0, 1, 2, 4096, 4097, 1 << 20)))
        near = int(getattr(header, field))
        return header._replace(**{field: self._number(near) % (1 << 64)})

    def _sealed(self, header: Header, rows: list[tuple[int, int, int]]) -> Frame:
        """Lies that are well signed get further."""
        frame = encode(self._bent(header)) + _packed(rows)
        return Frame(frame + xxhash.xxh3_64_digest(frame))

    def _mutate_one(self, frames: list[Frame]) -> None:
        at = self.rng.randrange(len(frames))
        frames[at] = Frame(mutated(self.rng, frames[at].data), frames[at].passed)
        if self.rng.random() < 0.1:
            frames.insert(at, frames[at])


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
            number = struct.pack("<Q", rng.choice(INTERESTING))
            changed[at : at + 8] = number
    return bytes(changed)


def _packed(rows: list[tuple[int, int, int]]) -> bytes:
    return b"".join(struct.pack("<qqq", *row) for row in rows)
