"""Answers the gets of one express connection in compiled code, in the calling thread, without the GIL.

Owns the memory of a question and its answer. Its rule: memory whose address is passed to C is kept alive here. Knows
neither puts nor how a new reader for a moved index is made.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from pathlib import Path

import numpy as np

from kvstore.native.prototypes import Function
from kvstore.native.reader import MappedReader
from protocol.native import C_FLAGS, load_library, shared_cache
from transfer.native import address_of

SOURCE = Path(__file__).with_name("answering.c")
MOST_KEYS = 4096
"""Limit of keys per get: 288 KiB of memory per connection. Clients send fewer."""
_HEAD_BYTES = 24
_KEY_BYTES, _ROW_BYTES, _ANSWER_BYTES = 24, 32, 16
_pointer, _int64, _uint64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64


class End(IntEnum):
    """Why `Desk.answer` returned."""

    OTHER = 1
    """A question arrived that is not answered here: call `Desk.take_head`."""
    LATE = 2
    HANGUP = 3
    RETIRED = 4
    """The index has moved: call `Desk.use` with a new reader, then `answer` again."""


class _State(ctypes.Structure):
    """State shared with C (`Desk` of answering.c)."""

    _fields_ = (
        ("locate", _pointer),
        ("mapping", _pointer),
        ("question", _pointer),
        ("answer", _pointer),
        ("pieces", _pointer),
        ("most_keys", _uint64),
        ("most_bytes", _uint64),
        ("most_ns", _int64),
        ("idle_ns", _int64),
        ("spin_ns", _int64),
        ("filled", _int64),
        ("active_at_ns", _int64),
        ("rest", ctypes.c_int32),
    )


@functools.cache
def library() -> Function:
    """Returns the compiled `answer_gets`. Raises CompilerError."""
    function: Function = load_library(SOURCE, C_FLAGS, shared_cache()).answer_gets
    function.argtypes, function.restype = (ctypes.c_int32, _pointer), ctypes.c_int32  # type: ignore[attr-defined]
    return function


class Desk:
    """Answers gets on one socket. Belongs to one thread."""

    def __init__(
        self,
        fd: int,
        *,
        most_bytes: int,
        most_s: float,
        idle_s: float,
        spin_ns: int,
    ) -> None:
        """Limits: `most_bytes` of values per answer, `most_s` per answer, `idle_s` until the next question."""
        self._answer_gets = library()
        self._fd = fd
        self._question = np.zeros(_HEAD_BYTES + MOST_KEYS * _KEY_BYTES, np.uint8)
        self._answer = np.zeros(_ANSWER_BYTES + MOST_KEYS * _ROW_BYTES, np.uint8)
        self._pieces = np.zeros((MOST_KEYS + 1, 2), np.uint64)
        self._reader: MappedReader | None = None
        self._state = _State(
            question=address_of(self._question),
            answer=address_of(self._answer),
            pieces=address_of(self._pieces),
            most_keys=MOST_KEYS,
            most_bytes=most_bytes,
            most_ns=int(most_s * 1e9),
            idle_ns=int(idle_s * 1e9),
            spin_ns=spin_ns,
        )
        self._at = ctypes.addressof(self._state)

    def use(self, reader: MappedReader) -> None:
        """Sets the index from which gets are answered."""
        self._reader = reader  # keeps its memory alive
        self._state.locate, self._state.mapping = reader.locate_at, reader.mapping_at

    def answer(self) -> End:
        """Answers gets until there is a reason to stop, which is returned."""
        assert self._reader is not None
        return End(self._answer_gets(self._fd, self._at))

    def take_head(self) -> bytes:
        """Returns the head of the question that ended `answer` with OTHER. Its body has not been received."""
        self._state.filled = 0
        return self._question[:_HEAD_BYTES].tobytes()
