"""What an allocator and its policies say to each other, and what both see of a request. Pure.

A policy decides in numbers of blocks: how many a request begins with, how many more than it needs when it grows, who
gives way. Which blocks these are, and who holds them, is the allocator's; what a policy may know of that are `Books`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from protocol.ids import BlockId, RequestId


class Growing(Protocol):
    """A request that holds blocks, or wants some. Allocators look at it whenever they need to and never change it: a
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
        """That it may generate."""

    @property
    def num_tokens(self) -> int:
        """Of context now, the latest one included: its next step needs room for so many."""


def num_generated(request: Growing) -> int:
    return request.num_tokens - request.num_prompt_tokens


@dataclass(slots=True, eq=False)
class Holder:
    """A request that has a table of blocks. The list is its worker's, too: it grows and shrinks in place."""

    request: Growing
    blocks: list[BlockId]
    num_runs: int  # of neighbours among them
    times_preempted: int


class Victim(NamedTuple):
    """Who gives way, and what that costs."""

    request_id: RequestId
    num_blocks: int  # that come free
    num_tokens: int  # whose KV is lost: to be computed again, or to be kept elsewhere


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

    def spare(self, holder: Holder) -> int:
        """Blocks of its table that hold no token yet."""

    def shared(self, request: Growing) -> int:
        """Leading blocks of its table, or of the one that it would get, that others hold, too."""

    @property
    def num_shared(self) -> int:
        """All blocks that several tables have, each once: they are free when the last of these ends."""


class Policy(Protocol):
    """One way to share a pool. It may keep what it learned, never who holds what."""

    @property
    def takes_back(self) -> bool:
        """Whether blocks without tokens go to others who need some; if not, they are promised."""

    def first(self, request: Growing, books: Books) -> int | None:
        """Blocks that its table begins with, at least those of its tokens; None: it has to wait."""

    def ahead(self, request: Growing, books: Books) -> int:
        """Blocks beyond those of its tokens, when it needs one."""

    def victim(self, needy: Growing, books: Books) -> Holder:
        """Who gives way so that `needy` goes on; it may be itself, and never the best-ranked holder unless that is
        the only one."""

    def admitted(self, request: Growing) -> None:
        """It has blocks (again)."""

    def preempted(self, request: Growing) -> None:
        """It has none any more and will want them back."""

    def ended(self, request: Growing, *, stopped: bool | None) -> None:
        """It generated its last token, or was `stopped` by its limit; None: by somebody's will, which says nothing."""

    def validate(self) -> None:
        """Raises AssertionError unless what it keeps is sound."""


class Plain:
    """What policies have in common that learn nothing and take nothing ahead: whoever came last gives way."""

    takes_back = False  # there is nothing, or it is promised

    def ahead(self, request: Growing, books: Books) -> int:
        return 0

    def victim(self, needy: Growing, books: Books) -> Holder:
        return max(books.holders.values(), key=lambda holder: holder.request.rank)

    def admitted(self, request: Growing) -> None:
        pass

    def preempted(self, request: Growing) -> None:
        pass

    def ended(self, request: Growing, *, stopped: bool | None) -> None:
        pass

    def validate(self) -> None:
        pass
