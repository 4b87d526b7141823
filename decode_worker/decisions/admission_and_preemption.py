"""Admission to the block pool and choice of preemption victims, by a policy of `engine.lookahead`.

The policy sees every request that holds blocks or was promised some (sequences, leases and whatever else the state
names) over one `BlockPool`, in which block tables share the blocks of equal prefixes.

Its rule: evaluating the policy costs as much as a small model's step. So a refused request is refused again without
evaluation until something may have changed: any event but a step's end, the end of a sequence, or `block_size` steps.
While nothing holds blocks, any request that fits is admitted. Otherwise requests of priority 0 and above leave the
pool's reserve free. Owns no blocks; does not know leases, phases or time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moonserve.engine.admission_policy import AdmissionPolicy, BlockHolder, OnDemandPolicy, PoolSnapshot, SequenceView
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import BlockId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A request that does not run here yet, as policies see it (implements `SequenceView`)."""

    request_id: RequestId
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int  # including the token that is computed next
    rank: tuple[int, int] = (0, 0)


class Admission:
    """Takes blocks from the pool for admitted requests. `claims` returns all current holders; the owner sets it."""

    def __init__(self, pool: BlockPool, block_size: int, policy: AdmissionPolicy | None = None) -> None:
        self.claims: Callable[[], Iterable[BlockHolder]] = lambda: ()
        self._pool = pool
        self._block_size = block_size
        self._policy: AdmissionPolicy = policy or OnDemandPolicy()
        self._refused: set[RequestId] = set()  # since the last change
        self._num_steps = 0  # since the last change

    def forget_refusals(self) -> None:
        """Forgets earlier refusals, since a refused request may fit now."""
        self._refused.clear()
        self._num_steps = 0

    def on_step(self) -> None:
        self._num_steps += 1
        if self._num_steps >= self._block_size:
            self.forget_refusals()

    def admit(
        self, request: SequenceView, keys: Sequence[BlockKey], num_blocks: int
    ) -> tuple[list[BlockId], list[BlockId]] | None:
        """Takes references to `num_blocks` blocks and returns (cached blocks that hold the leading keys, fresh blocks).
        Returns None, and takes nothing, if the request has to wait."""
        if request.request_id in self._refused:
            return None
        found = self._pool.match_prefix(keys)
        self._pool.retain(found)  # before `allocate`, which might evict them
        snapshot = PoolSnapshot(self._pool, self._block_size, self.claims())
        snapshot.set_prefix(request, found)
        leaves = request.rank[0] >= 0 and bool(snapshot.holders)
        if leaves:
            snapshot.reserve(self._pool.num_reserved)
        lets_in = not snapshot.holders or self._policy.admits(request, snapshot)
        missing = num_blocks - len(found)
        fresh = self._pool.allocate(missing, leave_reserve=leaves) if lets_in else None
        if fresh is None:
            self._pool.release(found)
            self._pool.want(missing)
            self._refused.add(request.request_id)
            return None
        self._pool.count_hits(found)
        self._policy.admitted(request)
        return found, fresh

    def choose_victim(self, needy: SequenceView, claims: Iterable[BlockHolder]) -> RequestId:
        """Returns the request among `claims` that gives up its blocks so that `needy` can go on. This may be `needy`
        itself. It is never the best-ranked request unless that is the only one."""
        own = [
            each._replace(blocks=[b for b in each.blocks if self._pool.references_of(b) == 1]) for each in claims
        ]  # a preemption does not free shared blocks
        snapshot = PoolSnapshot(self._pool, self._block_size, own)
        return self._policy.victim(needy, snapshot).request.request_id

    def on_preempted(self, request: SequenceView) -> None:
        self._policy.preempted(request)
        self.forget_refusals()

    def on_ended(self, request: SequenceView, *, stopped: bool | None) -> None:
        """Reports a finished request. `stopped`: True if it reached its token limit, False if it generated its last
        token, None if it was ended from outside."""
        self._policy.ended(request, hit_limit=stopped)
        self.forget_refusals()

    def validate(self) -> None:
        self._policy.validate()
