"""What a slice reads from or fills on this side: the registered segment, or a copy with a fault in it."""

from __future__ import annotations

import numpy as np

from transfer import scatter
from transfer.base import Slice
from transfer.native import address_of
from transfer.rdma.fabric import Device
from transfer.rows import LENGTH, LOCAL, Rows


class LocalMemory:
    """`rows` count from `base`, which is registered under `key`."""

    __slots__ = ("base", "key", "rows")

    def __init__(self, rows: Rows, base: int, key: int) -> None:
        self.rows = rows
        self.base = base
        self.key = key

    def checksum(self, part: Slice) -> int:
        return scatter.checksum(part.local.buffer, part.rows, LOCAL)

    def release(self) -> None:
        """The slice has ended."""


class DamagedCopy(LocalMemory):
    """The slice's bytes, packed, with the first one flipped (fault injection)."""

    __slots__ = ("_bytes", "_region")

    def __init__(self, part: Slice, device: Device) -> None:
        packed = bytearray()
        for _, local, length in part.rows.tolist():
            packed += part.local.buffer[local : local + length]
        packed[0] ^= 0xFF
        self._bytes = packed
        base = address_of(packed)
        self._region = device.register(base, len(packed), remote_read=False, remote_write=False)
        rows = part.rows.copy()
        rows[:, LOCAL] = np.cumsum(rows[:, LENGTH]) - rows[:, LENGTH]
        super().__init__(rows, base, self._region.local_key)

    def checksum(self, part: Slice) -> int:
        if part.damage_shows:
            return super().checksum(part)
        return scatter.checksum(memoryview(self._bytes), self.rows, LOCAL)

    def release(self) -> None:
        self._region.close()
