"""Actions of a prefill worker: the output of `state.PrefillState.handle`. Pure data.

Each action that starts an operation names the events that answer it (→). Exactly one of them comes, even if the
operation is withdrawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import Slice
from prefill_worker.events import Landing
from prefill_worker.load_or_compute import LoadChoice
from protocol.ids import BlockId, GatewayId, LeaseId, RequestId
from protocol.keys import BlockKey
from protocol.request import Endpoint, PrefillReport, Request, Token
from worker.events import Action
from worker.events import Fail as Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveLanding(Action):
    """Lease blocks on the decode worker → LandingGranted | LandingRefused."""

    request_id: RequestId
    lease_id: LeaseId
    decode: Endpoint
    num_tokens: int
    num_prompt_tokens: int  # how many of num_tokens are the client's prompt
    max_tokens: int  # limit of tokens generated after the prompt
    tenant: str
    priority: int
    block_keys: tuple[BlockKey, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawReservation(Action):
    """Cancel the ReserveLanding in flight, which still answers. Not answered itself."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLanding(Action):
    """Release a lease, or make sure that it is not granted later. Not answered."""

    request_id: RequestId
    decode: Endpoint
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPart:
    """Keys of blocks that one store may hold on disk."""

    store: Endpoint
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPrefix(Action):
    """Request stores to load from disk to memory the blocks that a waiting request will read. Not answered."""

    request_id: RequestId
    parts: tuple[PrefetchPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPart:
    """Blocks to read from one store."""

    store: Endpoint
    keys: tuple[BlockKey, ...]
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPrefix(Action):
    """Read prefix blocks into the own pool → PrefixLoaded | PrefixLoadFailed. Parts are read in order. If
    `choice.layers_at_once` is set, that many layers of all parts are read per turn, with a PrefixProgress each."""

    request_id: RequestId
    parts: tuple[PrefixPart, ...]
    choice: LoadChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPrefix(Action):
    """Log that the whole prefix is computed although stores hold parts of it. Not answered."""

    request_id: RequestId
    choice: LoadChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBlocks(Action):
    """Write whole blocks to the target. `pairs`: (own block, block at the target) → WritesDone | WritesFailed."""

    request_id: RequestId
    landing: Landing
    pairs: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """One slice of a step, and the landing blocks that its new KV is written to."""

    slice: Slice
    landing: Landing | None  # None = nothing is sent, and no WritesDone comes
    send_from: int  # first token that is sent, at least slice.start
    complete: tuple[int, ...]  # block indexes that are complete after this step; each gets a checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(Action):
    """Run one forward pass → StepDone | StepGivenUp | StepFailed, then WritesDone | WritesFailed for each slice that is
    sent."""

    plans: tuple[SlicePlan, ...]
    step_id: int = 0  # index among the steps in flight; always 0 without a pipeline
    max_wait_s: float | None = None
    """None if everything that the step needs is loaded. Otherwise the prefix of the step's only slice is still
    arriving, and the engine may wait this long in all for its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFirstToken(Action):
    """Send the first token and the prefill report to the gateway. Not answered."""

    gateway_id: GatewayId
    token: Token
    report: PrefillReport
    traceparent: str = ""  # empty = not traced


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHandoff(Action):
    """Move the sequence to the decode worker → HandoffAccepted | HandoffCorrupt | HandoffFailed."""

    request: Request
    decode: Endpoint
    lease_id: LeaseId
    first_token_id: int
    num_cached_blocks: int  # leading blocks that the target had cached
    checksums: tuple[int, ...]  # of all other blocks, in order
    timeout_s: float  # remaining time of the request
    transfer_s: float  # time since the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItem:
    """A block to be put into the store."""

    key: BlockKey
    parent: BlockKey | None
    checksum: int
    block: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBlocks(Action):
    """Write blocks to the home store → PutDone | PutFailed."""

    put_id: int
    store: Endpoint
    items: tuple[PutItem, ...]
