"""`WorstCase`: a request begins with room for its prompt and all that it may generate, so that nobody ever gives way.

What a client allows is mostly far more than what it gets: most of such a table stays empty.
"""

from __future__ import annotations

from engine.lookahead.base import Books, Growing, Plain


class WorstCase(Plain):
    def first(self, request: Growing, books: Books) -> int | None:
        most = books.blocks_for(request.num_prompt_tokens + request.max_tokens)
        wanted = min(most, books.num_blocks)  # one that may outgrow the pool runs alone
        return wanted if wanted <= books.num_free else None
