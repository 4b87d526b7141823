"""Small numbers by record, without an object for each."""

from __future__ import annotations

from array import array

from kvstore.native.base import Record


class Column:
    """Numbers of one type code of `array`; 0 where none was set."""

    def __init__(self, typecode: str) -> None:
        self._values = array(typecode)

    def __getitem__(self, record: Record) -> int:
        return self._values[record] if 0 <= record < len(self._values) else 0

    def __setitem__(self, record: Record, value: int) -> None:
        if record < 0:
            raise IndexError(record)
        missing = record + 1 - len(self._values)
        if missing > 0:
            # `array` itself keeps room for a sixteenth more, so this costs O(1) in the long run.
            self._values.frombytes(bytes(missing * self._values.itemsize))
        self._values[record] = value

    @property
    def nbytes(self) -> int:
        return self._values.__sizeof__()
