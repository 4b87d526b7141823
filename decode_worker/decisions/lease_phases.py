"""Leases: a lease is a prefill worker's timed right to write a prompt's KV into this worker's blocks.

    OPEN → VERIFYING → SEALING → (a sequence)
      ↓  ↖____↙  ↓        ↓
    ENDING ←─────┴────────┘  → (blocks are free)

Blocks leave the lease, to a sequence or to the pool, only after the lease's window has been closed. So no peer can
write into a block that is readable, shared or reused. An expired lease is refused and never revived.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from moonserve.decode_worker.decisions.admission_and_preemption import Prospect
from moonserve.decode_worker.decisions.events import CommitRequested, GrantLease, LandedBlock, ReserveRequested
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import BlockId, LeaseId, RequestId


class LeasePhase(StrEnum):
    """Phases of a lease's life."""

    OPEN = "open"  # granted; peers may write; the lease can expire
    VERIFYING = "verifying"  # a commit is being checked; the lease cannot expire
    SEALING = "sealing"  # the commit was accepted; the window is being closed
    ENDING = "ending"  # expired, released or cancelled; the window is being closed


_NEXT: dict[LeasePhase, frozenset[LeasePhase]] = {
    LeasePhase.OPEN: frozenset({LeasePhase.VERIFYING, LeasePhase.ENDING}),
    LeasePhase.VERIFYING: frozenset({LeasePhase.OPEN, LeasePhase.SEALING, LeasePhase.ENDING}),
    LeasePhase.SEALING: frozenset({LeasePhase.ENDING}),
    LeasePhase.ENDING: frozenset(),
}


class Ending(StrEnum):
    """Reasons why a lease has ended, worded for error messages."""

    COMMITTED = "was committed"
    EXPIRED = "has expired"
    RELEASED = "was released"
    CANCELLED = "was cancelled"
    STOPPED = "ended with its worker"


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One granted reservation, until its blocks pass to a sequence or return to the pool."""

    lease_id: LeaseId
    prospect: Prospect  # the sequence that the lease's holder will become
    num_tokens: int
    block_keys: tuple[BlockKey, ...]  # keys of the full blocks
    blocks: tuple[BlockId, ...]
    num_cached: int  # leading blocks that are shared with other tables and outside the window
    ttl_s: float
    expires_at: float  # valid in the phase OPEN; the phases below likewise
    phase: LeasePhase = LeasePhase.OPEN
    history: list[LeasePhase] = field(default_factory=list)
    commit: CommitRequested | None = None  # VERIFYING, SEALING
    committed_at: float = 0.0  # VERIFYING, SEALING
    ending: Ending | None = None  # ENDING

    @property
    def holder(self) -> RequestId:
        return self.prospect.request_id

    @property
    def landing_blocks(self) -> tuple[BlockId, ...]:
        """The blocks that peers may write; only this lease holds them."""
        return self.blocks[self.num_cached :]

    @property
    def expiry_at(self) -> float | None:
        """Time at which the lease expires; None in phases in which it cannot expire."""
        return self.expires_at if self.phase is LeasePhase.OPEN else None

    @property
    def grant(self) -> GrantLease:
        """The answer to the reservation. Only valid while the lease is OPEN."""
        return GrantLease(
            lease_id=self.lease_id,
            blocks=self.blocks,
            num_cached=self.num_cached,
            ttl_s=self.ttl_s,
        )

    def enter(self, phase: LeasePhase) -> None:
        """Enters a phase. Raises RuntimeError, and changes nothing, if the transition is not in the table."""
        if phase not in _NEXT[self.phase]:
            past = " → ".join([*self.history, self.phase])
            raise RuntimeError(f"lease {self.lease_id} cannot become {phase}: {past}")
        self.history.append(self.phase)
        self.phase = phase

    def commit_error(self, commit: CommitRequested, max_model_len: int) -> InvalidRequest | None:
        """Returns the first reason why a commit under this lease is invalid, or None."""
        request = commit.request
        if request.request_id != self.holder:
            return self._invalid(f"the lease belongs to {self.holder}, not {request.request_id}")
        if len(request.token_ids) != self.num_tokens + 1:
            return self._invalid(
                f"{len(request.token_ids)} tokens committed; expected {self.num_tokens} with KV and one sampled"
            )
        if request.num_prompt_tokens > self.num_tokens:
            return self._invalid(f"{request.num_prompt_tokens} prompt tokens exceed the landing")
        if len(request.token_ids) > max_model_len:
            return self._invalid(f"longer than this worker's max_model_len of {max_model_len}")
        if request.block_keys[: len(self.block_keys)] != self.block_keys:
            return self._invalid("block keys differ from those that were reserved")
        if len(commit.checksums) != len(self.landing_blocks):
            return self._invalid(f"{len(commit.checksums)} checksums for {len(self.landing_blocks)} landed blocks")
        return None

    def written_blocks(self, commit: CommitRequested, block_size: int) -> tuple[LandedBlock, ...]:
        """Returns the written blocks with the checksums that `commit` claims for them."""
        return tuple(
            LandedBlock(
                index=index,
                block=self.blocks[index],
                num_tokens=min(block_size, self.num_tokens - index * block_size),
                checksum=checksum,
                part_layers=commit.part_layers,
            )
            for index, checksum in enumerate(commit.checksums, start=self.num_cached)
        )

    def _invalid(self, message: str) -> InvalidRequest:
        return InvalidRequest(message, lease=self.lease_id, request=self.holder)


def prospect_of(event: ReserveRequested, max_model_len: int) -> Prospect:
    """Returns the sequence that a reservation leads to. It begins with one token more than the tokens that land."""
    num_prompt = min(event.num_prompt_tokens or event.num_tokens, event.num_tokens)
    most = max(max_model_len - num_prompt, 1)
    return Prospect(
        request_id=event.request_id,
        tenant=event.tenant,
        num_prompt_tokens=num_prompt,
        max_tokens=most if event.max_tokens is None else min(event.max_tokens, most),
        num_tokens=event.num_tokens + 1,
        rank=(event.priority, 0),
    )
