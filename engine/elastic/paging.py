"""Which bytes of a model's range make up one page, and which blocks lie in it.

A pool is layer-major (`protocol.layout`): a block's pieces lie in 2·layers slabs, one after another in the range. A
*page* is the same span of blocks in every slab, mapped and unmapped together (as kvcached does it); a *frame* is the
unit of physical memory, and a page costs as many frames as its spans fill. Why not block-major inside page groups: then
a page would cost a single frame, but what kernels, `KvPool` and every transfer see, one tensor per layer, would be
gone. The price is that memory moves 2·layers frames at a time, so frames are kept as small as the backing can.

Does not know which pages are mapped.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.layout import KvLayout

SPAN_BYTES = 64 << 10
"""What a worker gives and takes of each layer's K and V at once: fewer bytes cost more calls, more keep more memory
where a single block is used."""
MIN_PAGES = 16
"""With fewer, one block in each would keep everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """The pages of one model's range of `num_pages` pages. A page has one *span* in each of `num_slabs` slabs; blocks
    [page · blocks_per_page, (page + 1) · blocks_per_page) lie in it."""

    num_pages: int
    num_slabs: int
    blocks_per_page: int
    span_bytes: int
    frame_bytes: int

    @classmethod
    def make(cls, layout: KvLayout, frame_bytes: int, range_bytes: int) -> Paging:
        """Pages for at least `range_bytes`. A span is the least that is both whole frames and whole pieces."""
        span_bytes = math.lcm(layout.piece_bytes, frame_bytes)
        page_bytes = span_bytes * layout.pieces_per_block
        return cls(
            num_pages=max(1, -(-range_bytes // page_bytes)),
            num_slabs=layout.pieces_per_block,
            blocks_per_page=span_bytes // layout.piece_bytes,
            span_bytes=span_bytes,
            frame_bytes=frame_bytes,
        )

    @classmethod
    def within(cls, layout: KvLayout, nbytes: int) -> Paging:
        """Pages of a worker's pool, at most `nbytes` of them: spans of about SPAN_BYTES, smaller ones where there would
        be fewer than MIN_PAGES pages. A page is one frame. Raises ConfigError when not even one fits."""
        smallest = math.lcm(layout.piece_bytes, mmap.PAGESIZE)
        most = nbytes // (MIN_PAGES * layout.pieces_per_block)
        span_bytes = smallest * max(1, min(-(-SPAN_BYTES // smallest), most // smallest))
        page_bytes = span_bytes * layout.pieces_per_block
        if page_bytes > nbytes:
            raise ConfigError(
                f"{nbytes} bytes of elastic KV do not hold a page of {page_bytes}, the least that the machine can take "
                "back of all layers at once"
            )
        return cls(
            num_pages=nbytes // page_bytes,
            num_slabs=layout.pieces_per_block,
            blocks_per_page=span_bytes // layout.piece_bytes,
            span_bytes=span_bytes,
            frame_bytes=page_bytes,
        )

    @property
    def num_blocks(self) -> int:
        """Of the whole range; as many as a `KvPool` over it has."""
        return self.num_pages * self.blocks_per_page

    @property
    def page_bytes(self) -> int:
        return self.num_slabs * self.span_bytes

    @property
    def frames_per_page(self) -> int:
        return self.page_bytes // self.frame_bytes

    @property
    def range_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def spans(self, page: int) -> list[int]:
        """Byte offsets of the page's spans, in the order of the slabs."""
        slab_bytes = self.num_pages * self.span_bytes
        first = page * self.span_bytes
        return [slab * slab_bytes + first for slab in range(self.num_slabs)]

    def pages_for(self, num_blocks: int) -> int:
        """Pages that hold this many blocks."""
        return -(-num_blocks // self.blocks_per_page)

    def whole_pages(self, floor: int, ceiling: int) -> tuple[int, int]:
        """Figures in frames: a ceiling is rounded down to whole pages, a floor up, but not above the ceiling. Raises
        ValueError for a floor above its ceiling."""
        if not 0 <= floor <= ceiling:
            raise ValueError(f"a floor of {floor} frames and a ceiling of {ceiling}")
        highest = ceiling // self.frames_per_page * self.frames_per_page
        return min(-(-floor // self.frames_per_page) * self.frames_per_page, highest), highest

    def pages_at(self, offset: int, nbytes: int) -> list[int]:
        """The pages that the range's bytes [offset, offset + nbytes) touch. Raises ValueError for bytes beyond it."""
        if not 0 <= offset < offset + nbytes <= self.range_bytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not in {self.range_bytes} bytes")
        first, last = offset // self.span_bytes, (offset + nbytes - 1) // self.span_bytes
        if last - first >= self.num_pages:  # a whole slab and more
            return list(range(self.num_pages))
        return sorted({span % self.num_pages for span in range(first, last + 1)})
