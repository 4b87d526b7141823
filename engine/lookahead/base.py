"""What an admission policy sees of requests and the pool, and `OnDemand`, the plainest policy. Pure.

A policy decides whether a request is let in now, and which request gives way when blocks run out. Which blocks these
are is the worker's business (`decode_worker.allotment`); what a policy may know of that are `Books`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from engine.block_pool import BlockPool
from protocol.ids import BlockId, RequestId


class Growing(Protocol):
    """A request that holds blocks, or wants some. Policies look at it whenever they need to and never change it: a
    worker's own sequences serve, and nobody has to tell of every token."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def rank(self) -> tuple[int, int]:
        """(priority, order of arrival): lower ones give way last."""

    @property
    def tenant(self) -> str: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """Tokens that it may generate."""

    @property
    def num_tokens(self) -> int:
        """Tokens of context now, the latest one included: its next step needs room for so many."""


def num_generated(request: Growing) -> int:
    return request.num_tokens - request.num_prompt_tokens


class Holder(NamedTuple):
    """A request that has blocks, or was promised some."""

    request: Growing
    blocks: Sequence[BlockId]
    times_preempted: int = 0


class Books:
    """What a policy may look at, at one moment: who holds blocks of a pool, where tables share those of equal
    prefixes."""

    def __init__(self, pool: BlockPool, block_size: int, holders: Iterable[Holder]) -> None:
        self.block_size = block_size
        self.num_blocks, self.num_free = pool.capacity, pool.num_free
        self._pool = pool
        self.holders = {each.request.request_id: each for each in holders}
        self._shared: dict[RequestId, int] = {}
        self.num_shared = 0
        """All blocks that several tables have, each once: they are free when the last of these ends."""
        if sum(len(holder.blocks) for holder in self.holders.values()) > pool.num_held:
            self.num_shared = self._count_shared()

    def _count_shared(self) -> int:
        found: set[BlockId] = set()
        for request_id, holder in self.holders.items():
            leading = _leading(holder.blocks, lambda block: self._pool.references_of(block) > 1)
            self._shared[request_id] = len(leading)
            found.update(leading)
        return len(found)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def shared(self, request: Growing) -> int:
        """Leading blocks of its table, or of the one that it would get, that others hold, too."""
        return self._shared.get(request.request_id, 0)

    def leave(self, num_blocks: int) -> None:
        """So many are not for this newcomer."""
        self.num_blocks -= num_blocks
        self.num_free -= num_blocks

    def finds(self, request: Growing, blocks: Sequence[BlockId]) -> None:
        """A reference to each of these blocks is this newcomer's; what has others, too, it shares."""
        shared = _leading(blocks, lambda block: self._pool.references_of(block) > 1)
        self._shared[request.request_id] = len(shared)


def _leading(blocks: Sequence[BlockId], holds: Callable[[BlockId], bool]) -> list[BlockId]:
    found: list[BlockId] = []
    for block in blocks:
        if not holds(block):
            break
        found.append(block)
    return found


class Policy:
    """One way to share a pool. It may keep what it learned, never who holds what; unless it says otherwise, nothing."""

    def admits(self, request: Growing, books: Books) -> bool:
        """Whether the request is let in now; otherwise it waits."""
        raise NotImplementedError

    def victim(self, needy: Growing, books: Books) -> Holder:
        """The holder that gives way so that `needy` goes on; it may be itself, and never the best-ranked holder unless
        that is the only one."""
        raise NotImplementedError

    def admitted(self, request: Growing) -> None:
        """It has blocks (again)."""

    def preempted(self, request: Growing) -> None:
        """It has none any more and will want them back."""

    def ended(self, request: Growing, *, stopped: bool | None) -> None:
        """It generated its last token, or was `stopped` by its limit; None: by somebody's will, which says nothing."""

    def validate(self) -> None:
        """Raises AssertionError unless what it keeps is sound."""


class OnDemand(Policy):
    """Gives a block when it is needed, and the latest arrival gives way when there is none (as vLLM does it). Admission
    keeps a block free for every holder (vLLM keeps none), or a share of the pool if that is more (vLLM's watermark)."""

    def __init__(self, kept_free: float = 0.0, per_holder: int = 1) -> None:
        """What admissions leave: a share of the pool, or blocks for each holder."""
        self._kept_free = kept_free
        self._per_holder = per_holder

    def admits(self, request: Growing, books: Books) -> bool:
        wanted = books.blocks_for(request.num_tokens) - books.shared(request)
        share = math.ceil(self._kept_free * books.num_blocks)
        return wanted + max(self._per_holder * len(books.holders), share) <= books.num_free

    def victim(self, needy: Growing, books: Books) -> Holder:
        return max(books.holders.values(), key=lambda holder: holder.request.rank)
