"""A page is the same span of blocks in every slab, and pages divide a range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.elastic.paging import Paging
from protocol.layout import KvLayout
from tests.engine.elastic.shapes import LAYOUT

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    block_size=st.sampled_from([16, 32, 48]),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 64, 80]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
frames = st.sampled_from([4096, 16384, 65536])
sizes = st.integers(1, 1 << 23)


@given(layouts, frames, sizes)
def test_every_piece_of_every_block_lies_in_its_blocks_page(
    layout: KvLayout, frame_bytes: int, nbytes: int
) -> None:
    """By the formula that pool, kernels and transfers use."""
    paging = Paging.make(layout, frame_bytes, nbytes)
    assert paging.range_bytes == layout.pool_bytes(paging.num_blocks) >= nbytes
    for block in {0, paging.blocks_per_page - 1, paging.num_blocks // 2, paging.num_blocks - 1}:
        page = block // paging.blocks_per_page
        for piece, start in enumerate(paging.spans(page)):
            offset = layout.pool_offset(paging.num_blocks, piece, block)
            assert start <= offset
            assert offset + layout.piece_bytes <= start + paging.span_bytes
            assert paging.pages_at(offset, layout.piece_bytes) == [page]


@given(layouts, frames, sizes)
def test_the_pages_spans_are_whole_frames_and_cover_the_range_once(
    layout: KvLayout, frame_bytes: int, nbytes: int
) -> None:
    paging = Paging.make(layout, frame_bytes, nbytes)
    spans = sorted(start for page in range(paging.num_pages) for start in paging.spans(page))
    assert spans == list(range(0, paging.range_bytes, paging.span_bytes))
    assert paging.span_bytes % frame_bytes == 0
    assert paging.frames_per_page * frame_bytes == paging.page_bytes


@given(st.integers(0, 80), st.integers(1, 80))
def test_bytes_touch_the_pages_that_have_a_span_there(first: int, count: int) -> None:
    paging = Paging.make(LAYOUT, 4096, 5 * 4 * 4096)
    offset, nbytes = first * 1000, count * 1000
    if offset + nbytes > paging.range_bytes:
        with pytest.raises(ValueError, match="is not in"):
            paging.pages_at(offset, nbytes)
        return
    touched = [
        page
        for page in range(paging.num_pages)
        if any(s < offset + nbytes and s + paging.span_bytes > offset for s in paging.spans(page))
    ]
    assert paging.pages_at(offset, nbytes) == touched
