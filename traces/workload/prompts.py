"""Builds prompts of exact length that share prefixes exactly where the hash ids of their records do.

Each hash id has an endless stream of token ids, a function of (seed, id). A prompt concatenates the heads of its ids'
streams. A stream begins with the id itself, encoded in token ids, so that two streams differ from the start.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moonserve.traces.format import TraceRecord
from moonserve.traces.workload.prefix_tree import prefix_tree

# In most tokenizers, the first few ids of the vocabulary are special tokens.
FIRST_TOKEN_ID = 16
MAX_HASH_IDS = 2**24


class PromptBuilder:
    """Builds prompts over a vocabulary of `vocab_size` token ids."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        if vocab_size <= FIRST_TOKEN_ID + 1:
            raise ValueError(f"a vocabulary of {vocab_size} is too small for prompts")
        self._base = vocab_size - FIRST_TOKEN_ID
        self._seed = seed

    def prompt(self, record: TraceRecord) -> list[int]:
        """Returns exactly `record.input_length` token ids."""
        pieces: list[npt.NDArray[np.int64]] = []
        remaining = record.input_length
        last = len(record.hash_ids) - 1
        for position, hash_id in enumerate(record.hash_ids):
            # The last stream also covers the tokens that rounding has left over.
            length = remaining if position == last else min(remaining, record.tokens_per_hash)
            pieces.append(self._stream(hash_id, length))
            remaining -= length
            if remaining == 0:
                break
        tokens: list[int] = np.concatenate(pieces).tolist()
        return tokens

    def _stream(self, hash_id: int, length: int) -> npt.NDArray[np.int64]:
        generator = np.random.Generator(np.random.Philox(key=[self._seed, hash_id]))
        tokens = generator.integers(0, self._base, size=length)
        head = self._digits(hash_id)[:length]
        tokens[: len(head)] = head
        return tokens + FIRST_TOKEN_ID

    def _digits(self, hash_id: int) -> list[int]:
        """Returns the id's digits in base `_base`, lowest first; always enough digits for the largest id."""
        digits: list[int] = []
        weight = 1
        while weight < MAX_HASH_IDS:
            digits.append(hash_id // weight % self._base)
            weight *= self._base
        return digits


def ideal_cached_tokens(records: Sequence[TraceRecord], block_size: int) -> list[int]:
    """Returns for each request the prompt tokens that an unlimited cache of blocks of `block_size` could supply.

    Only full blocks count. A request is cached from its arrival on. The last prompt token is always computed.
    """
    visits = prefix_tree(records).visits
    return [
        min(visit.num_seen * record.tokens_per_hash, record.input_length - 1) // block_size * block_size
        for visit, record in zip(visits, records, strict=True)
    ]
