"""`Allotment`: who is let in to the pool and who gives way, as a policy of `engine.lookahead` says.

The policy's books are made of what the worker has: everybody who holds blocks or was promised some (sequences, landings
and whatever else a state names) over one `BlockPool`, where tables share the blocks of equal prefixes.

Its rule: a look at the policy costs as much as a small model's step, so a request that was refused is refused again,
unseen, until something may have changed: any event but a step's end, the end of a sequence, a block's worth of steps.
Without any holder whoever fits is let in; otherwise requests of priority 0 and above leave the pool's reserve free.
Owns no blocks; does not know leases, phases or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.lookahead.base import Growing, Holder, OnDemand, Policy
from protocol.ids import BlockId, RequestId
from protocol.keys import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A request that is not running here yet, as policies see it (`Growing`)."""

    request_id: RequestId
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int  # the one that is computed next included
    rank: tuple[int, int] = (0, 0)
    model: str = ""


class Claim(NamedTuple):
    """Blocks that somebody has."""

    request: Growing
    blocks: Sequence[BlockId]
    times_preempted: int = 0


class Books:
    """What a policy may look at, at one moment (`engine.lookahead.base.Books`)."""

    def __init__(self, pool: BlockPool, block_size: int, claims: Iterable[Claim]) -> None:
        self.block_size = block_size
        self.num_blocks, self.num_free = pool.capacity, pool.num_free
        self._pool = pool
        self.holders: dict[RequestId, Holder] = {}
        for request, blocks, times in claims:
            self.holders[request.request_id] = Holder(request, blocks, times)
        self._shared: dict[RequestId, int] = {}
        self.num_shared = 0
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
        return self._shared.get(request.request_id, 0)

    def leave(self, num_blocks: int) -> None:
        """So many are not for this newcomer."""
        self.num_blocks -= num_blocks
        self.num_free -= num_blocks

    def finds(self, request: Growing, blocks: Sequence[BlockId]) -> None:
        """A reference to each of these blocks is this newcomer's; what has others, too, it shares."""
        shared = _leading(blocks, lambda block: self._pool.references_of(block) > 1)
        self._shared[request.request_id] = len(shared)


class Allotment:
    """Takes blocks from the pool for those who are let in. `claims`: everybody who has some, now."""

    def __init__(self, pool: BlockPool, block_size: int, policy: Policy | None = None) -> None:
        self.claims: Callable[[], Iterable[Claim]] = lambda: ()
        self._pool = pool
        self._block_size = block_size
        self._policy: Policy = policy or OnDemand()
        self._refused: set[RequestId] = set()  # since the last change
        self._num_steps = 0  # likewise

    def changed(self) -> None:
        """Somebody may be let in who was not."""
        self._refused.clear()
        self._num_steps = 0

    def stepped(self) -> None:
        self._num_steps += 1
        if self._num_steps >= self._block_size:
            self.changed()

    def take(
        self, request: Growing, keys: Sequence[BlockKey], num_blocks: int
    ) -> tuple[list[BlockId], list[BlockId]] | None:
        """References to `num_blocks` blocks: those that hold its leading keys, and fresh ones. None and no change:
        it has to wait."""
        if request.request_id in self._refused:
            return None
        found = self._pool.match_prefix(keys)
        self._pool.retain(found)  # before allocate, which might evict them
        books = Books(self._pool, self._block_size, self.claims())
        books.finds(request, found)
        leaves = request.rank[0] >= 0 and bool(books.holders)
        if leaves:
            books.leave(self._pool.num_reserved)
        lets_in = not books.holders or self._policy.admits(request, books)
        missing = num_blocks - len(found)
        fresh = self._pool.allocate(missing, leave_reserve=leaves) if lets_in else None
        if fresh is None:
            self._pool.release(found)
            self._pool.want(missing)
            self._refused.add(request.request_id)
            return None
        self._pool.reused(found)
        self._policy.admitted(request)
        return found, fresh

    def victim(self, needy: Growing, claims: Iterable[Claim]) -> RequestId:
        """Who of these gives its blocks up so that `needy` goes on; perhaps itself, and never the best-ranked one
        unless it is the only one."""
        own = [
            each._replace(blocks=[b for b in each.blocks if self._pool.references_of(b) == 1])
            for each in claims
        ]  # what others have, too, does not come free
        books = Books(self._pool, self._block_size, own)
        return self._policy.victim(needy, books).request.request_id

    def preempted(self, request: Growing) -> None:
        self._policy.preempted(request)
        self.changed()

    def ended(self, request: Growing, *, stopped: bool | None) -> None:
        """It generated its last token, or was `stopped` by its limit; None: by somebody's will."""
        self._policy.ended(request, stopped=stopped)
        self.changed()

    def validate(self) -> None:
        self._policy.validate()


def _leading(blocks: Sequence[BlockId], holds: Callable[[BlockId], bool]) -> list[BlockId]:
    found: list[BlockId] = []
    for block in blocks:
        if not holds(block):
            break
        found.append(block)
    return found
