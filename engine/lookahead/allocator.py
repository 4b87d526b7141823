"""`Allocator`: tables of blocks over one space, as a policy wants them.

Requirements, and how each is met:
1. *A block is in at most one table.* Blocks come from the space and go back to it here only; `validate` proves it.
2. *Who holds something can go on.* `grow` gives what the next step needs: from what is free, then from blocks that
   others have ahead where the policy lets go of them; only then must somebody give way, whom `victim` names.
3. *Nobody waits for ever.* Without any holder a request that fits into the pool is admitted whatever the policy says,
   and the best-ranked holder never gives way to another.
4. *Policies are measured alike.* Calls, blocks, runs and what was lost are counted here.

Between `admit` and `finish` (or `preempt`, `drop`) the table belongs to the allocator; its worker reads it, between
calls. Does not know prefixes, steps, time, tokens' values.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_runs import num_runs
from engine.lookahead.base import Growing, Holder, Policy, Victim
from engine.lookahead.space import BlockSpace
from protocol.errors import InvalidRequest
from protocol.ids import BlockId, RequestId


@dataclass(slots=True)
class Counters:
    """Since the allocator began."""

    calls: int = 0  # of `admit` and `grow`, refused ones included, and of those that end a table
    admissions: int = 0  # those after a preemption included
    refusals: int = 0
    reallocations: int = 0  # of tables that could not go on behind their last block
    blocks_taken_back: int = 0  # that somebody had ahead
    preemptions: int = 0
    preempted_tokens: int = 0  # whose KV was given up


class Allocator:
    def __init__(self, num_blocks: int, block_size: int, policy: Policy) -> None:
        self.block_size = block_size
        self.policy = policy
        self.counters = Counters()
        self.holders: dict[RequestId, Holder] = {}  # in order of admission
        self.shortened: list[RequestId] = []  # tables that lost blocks ahead, to be taken
        self._space = BlockSpace(num_blocks)
        self._num_runs = 0
        self._preempted: dict[RequestId, int] = {}  # how often, of those without a table

    # -- figures

    @property
    def num_blocks(self) -> int:
        return self._space.num_blocks

    @property
    def num_free(self) -> int:
        return self._space.num_free

    @property
    def num_held(self) -> int:
        """In tables, with or without tokens."""
        return self.num_blocks - self.num_free

    @property
    def num_runs(self) -> int:
        """Of all tables together; as many as holders where nothing is fragmented."""
        return self._num_runs

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def spare(self, holder: Holder) -> int:
        """Blocks of its table that hold no token yet."""
        return max(len(holder.blocks) - self.blocks_for(holder.request.num_tokens), 0)

    def shared(self, request: Growing) -> int:
        """None: no block is in two tables."""
        return 0

    @property
    def num_shared(self) -> int:
        return 0

    def has_room(self, request: Growing) -> bool:
        """For its next step."""
        table = self.holders[request.request_id].blocks
        return request.num_tokens <= len(table) * self.block_size

    # -- tables

    def admit(self, request: Growing) -> list[BlockId] | None:
        """A table with room for its tokens, or None: it waits. Raises InvalidRequest when it can never fit, ValueError
        when it has one."""
        if request.request_id in self.holders:
            raise ValueError(f"{request.request_id} has blocks already")
        self.counters.calls += 1
        needed = self._needed(request)
        first = self.policy.first(request, self)
        if first is None and not self.holders:
            first = needed
        blocks = None if first is None else self._take(needed, first - needed)
        if blocks is None:
            self.counters.refusals += 1
            return None
        times = self._preempted.pop(request.request_id, 0)
        holder = Holder(request, blocks, num_runs(blocks), times)
        self.holders[request.request_id] = holder
        self._num_runs += holder.num_runs
        self.counters.admissions += 1
        self.policy.admitted(request)
        return blocks

    def grow(self, request: Growing) -> bool:
        """Makes room for its tokens; False when somebody has to give way first. Raises InvalidRequest when it has
        outgrown the pool."""
        self.counters.calls += 1
        holder = self.holders[request.request_id]
        missing = self._needed(request) - len(holder.blocks)
        if missing <= 0:
            return True
        last = holder.blocks[-1]
        more = self._take(missing, self.policy.ahead(request, self), holder)
        if more is None:
            return False
        self.counters.reallocations += more[0] != last + 1
        gained = num_runs([last, *more]) - 1
        holder.blocks += more
        holder.num_runs += gained
        self._num_runs += gained
        return True

    def victim(self, needy: Growing) -> Victim:
        """Who gives way so that `needy` can go on, perhaps itself, and what that costs."""
        holder = self.policy.victim(needy, self)
        return Victim(holder.request.request_id, len(holder.blocks), holder.request.num_tokens)

    def preempt(self, request_id: RequestId) -> None:
        """It gives its blocks up and is to be admitted again."""
        holder = self._release(request_id)
        self.counters.preemptions += 1
        self.counters.preempted_tokens += holder.request.num_tokens
        self._preempted[request_id] = holder.times_preempted + 1
        self.policy.preempted(holder.request)

    def finish(self, request: Growing, *, stopped: bool) -> None:
        """It generated its last token by itself, or was `stopped` by its limit."""
        self._release(request.request_id)
        self.policy.ended(request, stopped=stopped)

    def drop(self, request: Growing) -> None:
        """Nobody wants it any more; also when it has no blocks."""
        if request.request_id in self.holders:
            self._release(request.request_id)
        self._preempted.pop(request.request_id, None)
        self.policy.ended(request, stopped=None)

    # -- blocks

    def _needed(self, request: Growing) -> int:
        needed = self.blocks_for(request.num_tokens)
        if needed > self.num_blocks:
            raise InvalidRequest(
                f"a sequence of {request.num_tokens} tokens does not fit into {self.num_blocks} "
                f"blocks of {self.block_size} tokens",
                request=request.request_id,
            )
        return needed

    def _take(self, needed: int, ahead: int, holder: Holder | None = None) -> list[BlockId] | None:
        """`needed` blocks and up to `ahead` more, in one run with the holder's where that is possible."""
        if needed > self.num_free and self.policy.takes_back:
            self._take_back(needed - self.num_free, holder)
        if needed > self.num_free:
            return None
        after = None if holder is None else holder.blocks[-1]
        return self._space.take(min(needed + ahead, self.num_free), after)

    def _take_back(self, count: int, needy: Holder | None) -> None:
        """`count` blocks that others have ahead, or none if there are not so many: all of those of few holders rather
        than some of many, so that they are in few runs."""
        others = (each for each in self.holders.values() if each is not needy)
        spares = sorted(((self.spare(each), each) for each in others), key=lambda pair: -pair[0])
        if count > sum(spare for spare, _ in spares):
            return
        for spare, holder in spares:
            if count <= 0:
                return
            self._shorten(holder, min(spare, count))
            self.shortened.append(holder.request.request_id)
            count -= spare

    def _shorten(self, holder: Holder, count: int) -> None:
        """The last `count` blocks leave its table."""
        keep = len(holder.blocks) - count
        gone = holder.blocks[keep:]
        lost = num_runs(holder.blocks[keep - 1 :]) - 1
        del holder.blocks[keep:]
        holder.num_runs -= lost
        self._num_runs -= lost
        self._space.give(gone)
        self.counters.blocks_taken_back += count

    def _release(self, request_id: RequestId) -> Holder:
        self.counters.calls += 1
        holder = self.holders.pop(request_id)
        self._space.give(holder.blocks)
        self._num_runs -= holder.num_runs
        holder.blocks.clear()
        return holder

    # -- proof

    def validate(self) -> None:
        """Raises AssertionError unless free + held = all blocks, no block is held twice and runs are counted right."""
        self._space.validate()
        tables = [holder.blocks for holder in self.holders.values()]
        held = {block for table in tables for block in table}
        assert len(held) == sum(map(len, tables)) == self.num_held, "a block is in two tables"
        assert all(self._space.is_taken(block) for block in held), "a held block is free"
        runs = [num_runs(holder.blocks) for holder in self.holders.values()]
        assert runs == [holder.num_runs for holder in self.holders.values()], "runs drifted"
        assert sum(runs) == self._num_runs, "the sum of runs drifted"
        assert all(tables), "a holder without blocks"
        assert not self._preempted.keys() & self.holders.keys(), "it holds and waits"
        self.policy.validate()
