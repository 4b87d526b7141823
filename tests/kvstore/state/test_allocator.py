"""The allocator never returns overlapping extents, never loses a byte, and allocates every length that fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.kvstore.state.allocator import ALIGNMENT, Allocator, padded
from tests.thoroughness import examples

Step = tuple[bool, int]  # (allocate that many bytes) or (free the n-th live extent)


@given(st.integers(0, 64), st.lists(st.tuples(st.booleans(), st.integers(0, 12 * ALIGNMENT)), max_size=80))
@settings(max_examples=examples(75), deadline=None)
def test_any_sequence_conserves_the_segment(units: int, steps: list[Step]) -> None:
    allocator = Allocator(units * ALIGNMENT + 17)
    live: dict[int, int] = {}
    for allocates, number in steps:
        if allocates:
            offset = allocator.allocate(number)
            if offset is None:
                edges = sorted([0, *live, *(at + size for at, size in live.items()), allocator.capacity])
                assert all(end - start < padded(number) for start, end in zip(edges[::2], edges[1::2], strict=True))
            else:
                assert offset % ALIGNMENT == 0
                live[offset] = padded(number)
        elif live:
            offset = list(live)[number % len(live)]
            allocator.free(offset, live.pop(offset))
        allocator.validate(live.items())
        assert allocator.used == sum(live.values())
    for offset, length in live.items():
        allocator.free(offset, length)
    assert allocator.free_bytes == allocator.capacity == units * ALIGNMENT
    allocator.validate([])  # one extent


def test_the_extent_freed_last_is_taken_first() -> None:
    allocator = Allocator(9 * ALIGNMENT)
    offsets = [allocator.allocate(ALIGNMENT) for _ in range(9)]
    for index in (1, 5, 3):
        offset = offsets[index]
        assert offset is not None
        allocator.free(offset, ALIGNMENT)
    assert allocator.allocate(ALIGNMENT) == offsets[3]
    allocator.validate((n * ALIGNMENT, ALIGNMENT) for n in range(9) if n not in (1, 5))


def test_freeing_what_is_not_allocated_is_an_error_and_changes_nothing() -> None:
    allocator = Allocator(4 * ALIGNMENT)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.free(offset, 1)
    with pytest.raises(KeyError):
        allocator.free(offset, 1)
    allocator.validate([])
