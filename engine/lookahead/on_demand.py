"""`OnDemand`: a block when it is needed, and whoever came last gives way when there is none (as vLLM does it).

Admission keeps a block free for every holder, as the decode worker's schedule does (vLLM keeps none), or a share of the
pool if that is more (vLLM's watermark). Knows nothing of the future.
"""

from __future__ import annotations

import math

from engine.lookahead.base import Books, Growing, Plain


class OnDemand(Plain):
    def __init__(self, kept_free: float = 0.0, per_holder: int = 1) -> None:
        """What admissions leave: a share of the pool, or blocks for each holder."""
        self._kept_free = kept_free
        self._per_holder = per_holder

    def first(self, request: Growing, books: Books) -> int | None:
        needed = books.blocks_for(request.num_tokens)
        wanted = needed - books.shared(request)
        share = math.ceil(self._kept_free * books.num_blocks)
        headroom = max(self._per_holder * len(books.holders), share)
        return needed if wanted + headroom <= books.num_free else None
