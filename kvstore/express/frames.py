"""Wire format of express connections (little-endian). Pure; knows no sockets and no state.

question  kind u8 · pin u8 · tenant's bytes u16 · count u32 · deadline in ms u32 · 0 u32 · bytes u64
  GET       count keys of 16 · count rooms u64 (maximum bytes of each value); `bytes` = maximum of all values
  PUT       count wishes (key 16 · parent 16 · length u64) · tenant · the values, `bytes` in all · count checksums u64
answer    status u8 · 0 · count u32 · bytes u64
  GET       count rows (offset u64 · length u32 · standing u32 · checksum u64 · generation u64) · the values SENT
  PUT       count outcomes u8 (`kvstore.promises.Outcome`)
  FAILURE   `bytes` of a common.Failure

One question is in flight at a time. A violation of the format ends the connection.
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
"""Name under which a lean server offers the switch to an express connection. No RPC method can have this name."""

QUESTION = struct.Struct("<BBHIIIQ")
ANSWER = struct.Struct("<BxxxIQ")
_WISH = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQ")
WISH_BYTES = _WISH.size
ROW_BYTES = 32
CHECKSUM = np.dtype("<u8")
WISH = np.dtype([("key", f"V{KEY_BYTES}"), ("parent", f"V{KEY_BYTES}"), ("length", "<u8")])

MAX_KEYS = 65_536
MAX_BYTES = 16 * 2**20
"""Bytes of values in one question or answer. Clients use far less; this limits the work a client can cause."""
NOT_LIMITED = 2**64 - 1
_LENGTH_BITS = 32


class Kind(IntEnum):
    GET = 1
    PUT = 2


class Status(IntEnum):
    OK = 0
    FAILURE = 1
    """The question was read to its end and refused. The connection stays usable."""


class MalformedQuestion(PeerLost):
    """The received bytes violate the protocol. The connection ends."""


def question(kind: Kind, count: int, deadline_ms: int, nbytes: int, *, pin: int = 0, tenant: bytes = b"") -> bytes:
    return QUESTION.pack(kind, pin, len(tenant), count, min(deadline_ms, 2**32 - 1), 0, nbytes)


def answer_room(count: int) -> bytearray:
    """Returns a buffer for the header and rows of an answer to a GET of `count` keys."""
    return bytearray(ANSWER.size + count * ROW_BYTES)


def rows_in(answer: bytearray, count: int) -> Words:
    """Returns the rows of an answer as a view of its memory, shape (count, 4)."""
    rows: Words = np.frombuffer(answer, np.uint64, count * 4, ANSWER.size).reshape(count, 4)
    return rows


def standing_and_length(extent: int) -> tuple[int, int]:
    """Splits the second word of a row."""
    return extent >> _LENGTH_BITS, extent & (1 << _LENGTH_BITS) - 1


def wishes(keys: Sequence[bytes], parents: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Returns the packed wishes of a PUT. A parent has 16 bytes, zeros for none."""
    return b"".join(map(_WISH.pack, keys, parents, lengths))  # half the time of filling three columns
