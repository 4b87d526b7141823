"""Which blocks a prefix needs, and where they lie."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moonserve.vllm.kv.cache_groups import CacheGroup, Page, alignment, longest_prefix

PAGES = (Page(0, 64, 64), Page(6400, 64, 48))

groups_of = st.lists(
    st.builds(CacheGroup, st.sampled_from([2, 4, 8]), st.just(PAGES), st.none() | st.integers(1, 20)),
    min_size=1,
    max_size=3,
)


@given(groups_of, st.data())
def test_the_longest_prefix_is_the_longest_whose_visible_blocks_are_there(
    groups: list[CacheGroup], data: st.DataObject
) -> None:
    limit = data.draw(st.integers(0, 64))
    present = [data.draw(st.lists(st.booleans(), max_size=64 // group.block_size)) for group in groups]
    num_computed = data.draw(st.integers(0, 4)) * alignment(groups)

    def is_enough(num_tokens: int) -> bool:
        """Checks each position that the next token can see."""
        for group, there in zip(groups, present, strict=True):
            first = 0 if group.window is None else max(0, num_tokens - group.window + 1)
            blocks = {position // group.block_size for position in range(max(first, num_computed), num_tokens)}
            if num_tokens // group.block_size > len(there) or not all(there[block] for block in blocks):
                return False
        return True

    expected = max(
        (n for n in range(0, limit + 1, alignment(groups)) if n > num_computed and is_enough(n)), default=num_computed
    )
    assert longest_prefix(groups, present, num_computed, limit) == expected


def test_a_blocks_pages_lie_in_its_layers_memory() -> None:
    group = CacheGroup(4, PAGES)
    assert group.block_bytes == 112
    assert np.array_equal(group.offsets([0, 3]), [[0, 6400], [192, 6592]])
