"""Interface of admission policies, their view of requests and the pool, and `OnDemandPolicy`, the simplest policy.
Pure.

A policy decides whether a request is admitted now, and which request is preempted when blocks run out. The worker
assigns blocks (`decode_worker.decisions.admission_and_preemption`); `PoolSnapshot` is the policy's view of them.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.protocol.request import BlockId, RequestId


class SequenceView(Protocol):
    """A request that holds blocks or waits for some. Policies read it at any time and never change it, so a worker can
    pass its own sequences and need not report each token."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def rank(self) -> tuple[int, int]:
        """(priority, order of arrival): requests with lower ranks are preempted last."""

    @property
    def tenant(self) -> str: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that the request may generate."""

    @property
    def num_tokens(self) -> int:
        """Current length with the latest token: the next step needs blocks for this many tokens."""


def num_generated(request: SequenceView) -> int:
    return request.num_tokens - request.num_prompt_tokens


class BlockHolder(NamedTuple):
    """A request that has blocks or was promised some."""

    request: SequenceView
    blocks: Sequence[BlockId]
    times_preempted: int = 0


class PoolSnapshot:
    """Snapshot of a pool for a policy: the holders of blocks, and the blocks of equal prefixes that they share."""

    def __init__(self, pool: BlockPool, block_size: int, holders: Iterable[BlockHolder]) -> None:
        self.block_size = block_size
        self.num_blocks, self.num_free = pool.capacity, pool.num_free
        self._pool = pool
        self.holders = {each.request.request_id: each for each in holders}
        self._shared: dict[RequestId, int] = {}
        self.num_shared = 0
        """Number of distinct blocks in several tables. Such a block is freed when the last of its holders ends."""
        if sum(len(holder.blocks) for holder in self.holders.values()) > pool.num_held:
            self.num_shared = self._count_shared()

    def _count_shared(self) -> int:
        found: set[BlockId] = set()
        for request_id, holder in self.holders.items():
            leading = self._leading_shared(holder.blocks)
            self._shared[request_id] = len(leading)
            found.update(leading)
        return len(found)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def shared(self, request: SequenceView) -> int:
        """Returns how many leading blocks of the request's table, or of its future table, others hold too."""
        return self._shared.get(request.request_id, 0)

    def reserve(self, num_blocks: int) -> None:
        """Reserves `num_blocks` that the new request may not use."""
        self.num_blocks -= num_blocks
        self.num_free -= num_blocks

    def set_prefix(self, request: SequenceView, blocks: Sequence[BlockId]) -> None:
        """Records the cached blocks of a new request, which already holds a reference to each. Those with further
        references are shared."""
        self._shared[request.request_id] = len(self._leading_shared(blocks))

    def _leading_shared(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        return list(takewhile(lambda block: self._pool.references_of(block) > 1, blocks))


class AdmissionPolicy:
    """Base class of policies. A policy may keep learned statistics, but not the holders of blocks. The callbacks do
    nothing by default."""

    def admits(self, request: SequenceView, snapshot: PoolSnapshot) -> bool:
        """Returns True if the request is admitted now; otherwise it waits."""
        raise NotImplementedError

    def victim(self, needy: SequenceView, snapshot: PoolSnapshot) -> BlockHolder:
        """Returns the holder to preempt so that `needy` can continue. It may be `needy` itself, but never the
        best-ranked holder unless that is the only one."""
        raise NotImplementedError

    def admitted(self, request: SequenceView) -> None:
        """Called when a request got blocks, also after a preemption."""

    def preempted(self, request: SequenceView) -> None:
        """Called when a request lost its blocks and will need them again."""

    def ended(self, request: SequenceView, *, hit_limit: bool | None) -> None:
        """Called when a request ended. `hit_limit`: False = by itself, True = at its limit, None = cancelled, which
        tells nothing about its length."""

    def validate(self) -> None:
        """Raises AssertionError if the policy's state is inconsistent."""


class OnDemandPolicy(AdmissionPolicy):
    """Allocates blocks when they are needed and preempts the latest arrival of the least urgent, like vLLM. Admission
    keeps a block free per holder (vLLM keeps none), or a share of the pool if that is more (vLLM's watermark)."""

    def __init__(self, kept_free: float = 0.0, per_holder: int = 1) -> None:
        """`kept_free`: share of the pool that admissions leave free. `per_holder`: blocks left free per holder."""
        self._kept_free = kept_free
        self._per_holder = per_holder

    def admits(self, request: SequenceView, snapshot: PoolSnapshot) -> bool:
        wanted = snapshot.blocks_for(request.num_tokens) - snapshot.shared(request)
        share = math.ceil(self._kept_free * snapshot.num_blocks)
        return wanted + max(self._per_holder * len(snapshot.holders), share) <= snapshot.num_free

    def victim(self, needy: SequenceView, snapshot: PoolSnapshot) -> BlockHolder:
        return max(snapshot.holders.values(), key=lambda holder: holder.request.rank)
