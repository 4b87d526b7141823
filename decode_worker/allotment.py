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

from engine.block_pool import BlockPool
from engine.lookahead.base import Books, Growing, Holder, OnDemand, Policy
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


class Allotment:
    """Takes blocks from the pool for those who are let in. `claims`: everybody who has some, now."""

    def __init__(self, pool: BlockPool, block_size: int, policy: Policy | None = None) -> None:
        self.claims: Callable[[], Iterable[Holder]] = lambda: ()
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

    def victim(self, needy: Growing, claims: Iterable[Holder]) -> RequestId:
        """Who of these gives its blocks up so that `needy` goes on; perhaps itself, and never the best-ranked one
        unless it is the only one."""
        own = [
            each._replace(blocks=[b for b in each.blocks if self._pool.references_of(b) == 1]) for each in claims
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
