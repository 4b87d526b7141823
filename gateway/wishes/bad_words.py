"""Words that an answer must not have, as the token sequences that spell them.

As vLLM reads `bad_words`: each word alone and behind a space, in the tokenizer's own way. What a model spells with
other tokens is not found.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import ApiError
from gateway.text.tokenizer import Tokenizer
from gateway.wishes.params import Limits


def spellings(
    tokenizer: Tokenizer, words: Sequence[str] | None, limits: Limits
) -> tuple[tuple[int, ...], ...]:
    """Each once, in order. Raises ApiError for a word that the model cannot write."""
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words or ()):
        for text in (word, f" {word.lstrip()}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids or max(token_ids) >= limits.vocab_size:
                raise ApiError(
                    400,
                    f"bad_words[{place}]: the model has no tokens for {word!r}",
                    param=f"bad_words[{place}]",
                    code="invalid_value",
                )
            found[token_ids] = None
    return tuple(found)
