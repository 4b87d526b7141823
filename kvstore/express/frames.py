"""What travels on an express connection (little-endian). Pure; knows no sockets and no state.

question  kind u8 · pin u8 · tenant's bytes u16 · count u32 · deadline in ms u32 · 0 u32 · bytes u64
  GET       count keys of 16 · count rooms u64 (the most that is wanted of each); bytes = of all values at most
  PUT       count wishes (key 16 · parent 16 · length u64) · tenant · the values, `bytes` in all · count checksums u64
answer    status u8 · 0 · count u32 · bytes u64
  GET       count rows (offset u64 · length u32 · standing u32 · checksum u64 · generation u64) · the values SENT
  PUT       count outcomes u8 (`kvstore.promises.Outcome`)
  FAILURE   `bytes` of a common.Failure

One question is under way at a time. Whatever breaks a rule ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from protocol.errors import PeerLost
from protocol.keys import KEY_BYTES

Words = npt.NDArray[np.uint64]

METHOD = "/moonserve.KvStore!express"
"""As which a lean server offers to make a connection one of these. No servicer can have a method of that name."""

QUESTION = struct.Struct("<BBHIIIQ")
ANSWER = struct.Struct("<BxxxIQ")
_WISH = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQ")
WISH_BYTES = _WISH.size
ROW_BYTES = 32
CHECKSUM = np.dtype("<u8")
WISH = np.dtype([("key", f"V{KEY_BYTES}"), ("parent", f"V{KEY_BYTES}"), ("length", "<u8")])

MAX_KEYS = 65_536
MAX_BYTES = 16 * 2**20
"""Of values in one question or answer. Clients ask for far less; this bounds what one may make a node do."""
NOT_LIMITED = 2**64 - 1
_LENGTH_BITS = 32


class Kind(IntEnum):
    GET = 1
    PUT = 2


class Status(IntEnum):
    OK = 0
    FAILURE = 1
    """The question was read to its end and refused; the connection goes on."""


class MalformedQuestion(PeerLost):
    """What arrived is none of this protocol; whoever sent it is no peer any more."""


def question(kind: Kind, count: int, deadline_ms: int, nbytes: int, *, pin: int = 0, tenant: bytes = b"") -> bytes:
    return QUESTION.pack(kind, pin, len(tenant), count, min(deadline_ms, 2**32 - 1), 0, nbytes)


def answer_room(count: int) -> bytearray:
    """Where an answer to a GET of `count` keys is made or received: header and rows."""
    return bytearray(ANSWER.size + count * ROW_BYTES)


def rows_in(answer: bytearray, count: int) -> Words:
    """Shape (count, 4), over the answer's own memory."""
    rows: Words = np.frombuffer(answer, np.uint64, count * 4, ANSWER.size).reshape(count, 4)
    return rows


def standing_and_length(extent: int) -> tuple[int, int]:
    """Of a row's second word."""
    return extent >> _LENGTH_BITS, extent & (1 << _LENGTH_BITS) - 1


def wishes(keys: Sequence[bytes], parents: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Parents of 16 bytes each, zeros for none."""
    return b"".join(map(_WISH.pack, keys, parents, lengths))  # half the price of three columns
