"""What an admission policy sees of requests and the pool, and `OnDemand`, the plainest policy. Pure.

A policy decides whether a request is let in now, and which request gives way when blocks run out. Which blocks these
are, and who holds them, is the worker's business (`decode_worker.allotment`); what a policy may know of that are
`Books`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    def model(self) -> str: ...

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


@dataclass(slots=True, eq=False)
class Holder:
    """A request that has blocks, or was promised some."""

    request: Growing
    blocks: Sequence[BlockId]
    times_preempted: int


class Books(Protocol):
    """What a policy may look at."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def holders(self) -> Mapping[RequestId, Holder]: ...

    def blocks_for(self, num_tokens: int) -> int: ...

    def shared(self, request: Growing) -> int:
        """Leading blocks of its table, or of the one that it would get, that others hold, too."""

    @property
    def num_shared(self) -> int:
        """All blocks that several tables have, each once: they are free when the last of these ends."""


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
