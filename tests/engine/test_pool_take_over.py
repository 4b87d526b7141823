"""A pool that begins with what another over the same memory has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from protocol.keys import NO_PARENT, BlockKey

NUM_BLOCKS = 8


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def pool(told: set[BlockKey] | None = None, num_blocks: int = NUM_BLOCKS) -> BlockPool:
    known = set() if told is None else told
    return BlockPool(
        num_blocks, on_added=lambda key, parent: known.add(key), on_removed=known.discard
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
    )
)
def test_whatever_was_findable_is_found_at_its_place_and_all_else_is_blank(
    chains: list[tuple[int, int, bool]],
) -> None:
    """Held blocks too: who held them has ended."""
    earlier = pool()
    for number, (length, kept, is_released) in enumerate(chains):
        blocks = earlier.allocate(length)
        if blocks is None:
            break
        parent = NO_PARENT
        for place, block in enumerate(blocks[: kept + 1]):
            mine = key(100 * (number + 1) + place)
            earlier.publish(block, mine, parent, checksum=place)
            parent = mine
        if is_released:
            earlier.release(blocks)
        earlier.validate()
    told: set[BlockKey] = set()
    later = pool(told)
    later.take_over(earlier)
    later.validate()
    pairs = earlier.keys()
    findable = [each for each, _ in pairs]
    assert told == set(findable)
    for each in findable:
        (block,) = later.match_prefix([each])
        assert earlier.key_of(block) == each
        assert later.checksum_of(block) == earlier.checksum_of(block)
    assert later.num_free == NUM_BLOCKS
    assert later.allocate(NUM_BLOCKS) is not None  # evicts them all
    later.validate()
    assert not told


def test_a_pool_in_use_or_of_another_size_takes_nothing_over() -> None:
    used = pool()
    used.allocate(1)
    with pytest.raises(ValueError, match="before anything"):
        used.take_over(pool())
    with pytest.raises(ValueError, match="one of its size"):
        pool().take_over(pool(num_blocks=NUM_BLOCKS + 1))
