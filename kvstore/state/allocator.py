"""Allocator of the space in one segment. It knows only the free extents; callers remember the length of their own.

Best fit with coalescing. Free extents are grouped by their exact length, and the distinct lengths are kept sorted.
There are at most √(2·capacity/ALIGNMENT) distinct lengths, and one or two while all objects have the same size, so
that allocating and freeing cost one binary search. The most recently freed extent of a length is used first, since it
is the warmest in cache.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

ALIGNMENT = 256
"""Offsets and lengths of extents are multiples of this: enough for tensors, and whole cache lines."""


def padded(nbytes: int) -> int:
    """Returns the space that an object of `nbytes` takes. An empty object takes space too, so that offsets differ."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Allocator:
    """Allocates extents of a segment of `capacity` bytes. A trailing part below the alignment is never used."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % ALIGNMENT
        self.used = 0
        self._length_at: dict[int, int] = {}  # free extents by their start
        self._start_before: dict[int, int] = {}  # free extents by their end
        self._starts_of: dict[int, dict[int, None]] = {}  # free extents by their length
        self._lengths: list[int] = []  # the keys of _starts_of, ascending
        if self.capacity:
            self._insert(0, self.capacity)

    @property
    def free_bytes(self) -> int:
        return self.capacity - self.used

    def allocate(self, nbytes: int) -> int | None:
        """Returns the offset of a new extent for `nbytes`; None if no free extent is long enough."""
        wanted = padded(nbytes)
        index = bisect_left(self._lengths, wanted)
        if index == len(self._lengths):
            return None
        length = self._lengths[index]
        start = next(reversed(self._starts_of[length]))
        self._take_out(start, length)
        if length > wanted:
            self._insert(start + wanted, length - wanted)
        self.used += wanted
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Frees an extent that `allocate(nbytes)` returned, and merges it with its free neighbours.

        Raises KeyError if a free extent starts or ends where this one does; other double frees are not detected.
        """
        length = padded(nbytes)
        if offset in self._length_at or offset + length in self._start_before:
            raise KeyError(offset)
        self.used -= length
        start, end = offset, offset + length
        if start in self._start_before:
            start = self._start_before[start]
            self._take_out(start, offset - start)
        if end in self._length_at:
            after = self._length_at[end]
            self._take_out(end, after)
            end += after
        self._insert(start, end - start)

    def validate(self, taken: Iterable[tuple[int, int]]) -> None:
        """Raises AssertionError unless the free extents and the `taken` ones (offset, nbytes) tile the segment, and no
        two free extents touch."""
        allocated = [(start, padded(nbytes)) for start, nbytes in taken]
        extents = sorted([*self._length_at.items(), *allocated])
        position, was_free = 0, False
        for start, length in extents:
            is_free = start in self._length_at
            assert start == position, f"hole or overlap at {position}"
            assert not (was_free and is_free), f"free neighbours at {start} not merged"
            position, was_free = start + length, is_free
        assert position == self.capacity, "extents do not cover the segment"
        assert self.used == sum(length for _, length in allocated)
        assert self._lengths == sorted(self._starts_of)
        indexed = {start: n for n, starts in self._starts_of.items() for start in starts}
        assert indexed == self._length_at
        assert {end - n: n for end, n in self._ends()} == self._length_at

    def _ends(self) -> list[tuple[int, int]]:
        return [(end, end - start) for end, start in self._start_before.items()]

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        if length not in self._starts_of:
            self._starts_of[length] = {}
            insort(self._lengths, length)
        self._starts_of[length][start] = None

    def _take_out(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        starts = self._starts_of[length]
        del starts[start]
        if not starts:
            del self._starts_of[length]
            del self._lengths[bisect_left(self._lengths, length)]
