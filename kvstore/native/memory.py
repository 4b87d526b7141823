"""Where an index gets its memory from, unless its owner has a place that peers can map."""

from __future__ import annotations

import mmap
from collections.abc import Callable

Allocate = Callable[[int], memoryview]
"""Gives so many bytes, zeroed, which stay where they are."""
Retire = Callable[[memoryview], None]
"""Takes memory back that the index has left. Readers that still map it find it marked, so it may be unmapped here but
not shortened or overwritten while somebody else maps it."""


def anonymous(nbytes: int) -> memoryview:
    """Memory of this process alone."""
    return memoryview(mmap.mmap(-1, nbytes))


def dropped(_memory: memoryview) -> None:
    """Goes with its last reference."""
