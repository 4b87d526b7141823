"""Generates, from a seed, byte sequences close to a session without checksums, so that no seal ends it early. Pure."""

import random
import struct
from enum import IntEnum

from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.scatter import Rows
from moonserve.transfer.tcp.frames import Header, Kind, encode

INTERESTING = (
    *(0, 1, 2, 7, 8, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1, 1 << 31),
    *(1 << 32, 1 << 40, (1 << 40) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
_FIELDS = ("segment_id", "window_id", "source_id", "nbytes")


class Passed(IntEnum):
    """Descriptor that is sent with a frame."""

    NONE = 0
    MEMORY = 1
    UNSEALED = 2
    NO_MEMORY = 3


Said = list[tuple[bytes, Passed]]


# Content of valid frames: the ids of the first segments and of the first window of an engine.
SEGMENT_ID, HIDDEN_ID, WINDOW_ID = 1, 2, 1
NBYTES = 64 << 10
WINDOW = (16 << 10, 16 << 10)


def session(rng: random.Random, base: int, *, near: bool) -> Said:
    """Generates a session. `near`: over shared memory, with more frame kinds. `base`: address of memory to offer."""
    kinds = [Kind.READ, Kind.WRITE, rng.choice(list(Kind))]
    if near:
        kinds += [Kind.OFFER, Kind.MAP, *[Kind.WRITE_FROM] * 3]
    said = [_frame(rng, base, rng.choice(kinds)) for _ in range(rng.randint(1, 6))]
    if near and rng.random() < 0.7:
        header = Header(kind=Kind.OFFER, source_id=1, nbytes=NBYTES)
        said.insert(0, (encode(header), Passed.MEMORY))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        at = rng.randrange(len(said))
        said[at] = (mutated(rng, said[at][0]), said[at][1])
        if rng.random() < 0.1:
            said.insert(at, said[at])
    return said


def _frame(rng: random.Random, base: int, kind: Kind) -> tuple[bytes, Passed]:
    """Generates a valid frame, in which a number is sometimes replaced."""
    header = Header(kind=kind, segment_id=SEGMENT_ID, source_id=rng.choice((1, 1, 1, 2, 4)))
    rows, payload, passed = scatter.rows(), b"", Passed.NONE
    match kind:
        case Kind.READ | Kind.MAP:
            header = header._replace(segment_id=rng.choice((SEGMENT_ID, HIDDEN_ID)))
            rows = _rows(rng, 0, NBYTES) if kind is Kind.READ else rows
        case Kind.WRITE | Kind.WRITE_FROM:
            header = header._replace(window_id=WINDOW_ID)
            rows = _rows(rng, *WINDOW)
            if kind is Kind.WRITE:
                nbytes = sum(row[2] for row in rows.tolist())
                payload = rng.randbytes(min(max(nbytes, 0), 1 << 18))
                header = header._replace(nbytes=nbytes % (1 << 64))
        case Kind.OFFER:
            header = header._replace(window_id=rng.choice((0, base)), nbytes=NBYTES)
            passed = rng.choice((Passed.MEMORY, Passed.MEMORY, *Passed))
        case _:
            header = header._replace(source_id=rng.getrandbits(63))
    header = header._replace(entries=len(rows))
    if rng.random() < 0.05:
        header = header._replace(entries=rng.choice((0, 1, 2, 4096, 4097, 1 << 20)))
    elif rng.random() < 0.2:
        field = rng.choice(_FIELDS)
        number = _number(rng, int(getattr(header, field))) % (1 << 64)
        header = header._replace(**{field: number})
    return encode(header) + scatter.pack(rows) + payload, passed


def _rows(rng: random.Random, start: int, nbytes: int) -> Rows:
    rows = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        length = rng.randint(0, min(nbytes, 8192))
        row = [start + rng.randint(0, nbytes - length), rng.randint(0, 4096), length]
        if rng.random() < 0.15:
            row[rng.choice((0, 0, 1, 2))] = _number(rng, row[0])
        rows.append((row[0], row[1], row[2]))
    return scatter.rows(*rows)


def _number(rng: random.Random, near: int) -> int:
    """Generates an int64 that is likely to be at a boundary."""
    number = rng.choice(INTERESTING)
    number = rng.choice((number, -number, near + number, near - number, -1, -4096))
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def mutated(rng: random.Random, data: bytes | bytearray) -> bytes:
    """Returns the data with a byte or number changed, or a piece removed, doubled or inserted."""
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
