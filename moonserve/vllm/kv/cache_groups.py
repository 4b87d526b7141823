"""Groups of layers that share a block table: where their blocks lie in memory, and which blocks a prefix needs. Pure.

In vLLM a request has one block table per group. A block of a group holds the KV of `block_size` tokens in all layers of
the group, one page per layer. Layers with a sliding window need only the blocks that the next token can see.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.uint64]
"""Byte offsets in the KV memory, shape (blocks, pages)."""


@dataclass(frozen=True, slots=True)
class Page:
    """Memory of a layer: the page of block `b` begins at `offset + b * stride`. Sizes in bytes."""

    offset: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group and its layers' pages, in the order in which a stored block holds them."""

    block_size: int
    pages: tuple[Page, ...]
    window: int | None = None
    """Number of tokens that a token can see, itself included. None = all before it."""

    @property
    def block_bytes(self) -> int:
        return sum(page.nbytes for page in self.pages)

    @property
    def page_bytes(self) -> list[int]:
        return [page.nbytes for page in self.pages]

    def first_needed(self, num_tokens: int) -> int:
        """Returns the first block that the token after `num_tokens` tokens can see."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size

    def offsets(self, block_ids: Sequence[int]) -> Offsets:
        """Returns where the blocks' pages begin."""
        begins = np.array([page.offset for page in self.pages], np.uint64)
        strides = np.array([page.stride for page in self.pages], np.uint64)
        return begins + np.array(block_ids, np.uint64).reshape(-1, 1) * strides


def alignment(groups: Sequence[CacheGroup]) -> int:
    """Returns the number of tokens of which every stored prefix's length is a multiple."""
    return math.lcm(*(group.block_size for group in groups))


def longest_prefix(
    groups: Sequence[CacheGroup], present: Sequence[Sequence[int]], num_computed: int, limit: int
) -> int:
    """Returns the most tokens, at most `limit`, whose needed blocks beyond the computed tokens are all present.

    `present[g][i]` tells of block `i` of group `g`. Returns `num_computed` if nothing is gained.
    """
    step = alignment(groups)
    missing = [[0, *itertools.accumulate(not there for there in each)] for each in present]
    for num_tokens in range(limit // step * step, num_computed, -step):
        for group, before in zip(groups, missing, strict=True):
            end = num_tokens // group.block_size
            first = min(end, max(group.first_needed(num_tokens), num_computed // group.block_size))
            if end >= len(before) or before[end] != before[first]:
                break
        else:
            return num_tokens
    return num_computed
