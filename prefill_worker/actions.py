"""What a prefill worker does next. Output of `state.PrefillState.handle`; pure data.

Each action that starts an operation names the events that answer it; exactly one of them comes, also when the
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
    num_prompt_tokens: int  # of them, the client's prompt
    max_tokens: int  # that may be generated behind it
    tenant: str
    priority: int
    block_keys: tuple[BlockKey, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawReservation(Action):
    """The ReserveLanding under way is not wanted any more; it still answers."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLanding(Action):
    """Give a lease back, or make sure that it was not granted. Not answered."""

    request_id: RequestId
    decode: Endpoint
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPart:
    """Blocks that one store may hold on disk."""

    store: Endpoint
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPrefix(Action):
    """Ask stores to bring to memory what a waiting request will read. Not answered."""

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
    """Read prefix blocks into the own pool → PrefixLoaded | PrefixLoadFailed. Parts in order; or, where
    `choice.layers_at_once` says so, all parts' first layers first, with a PrefixProgress for each few."""

    request_id: RequestId
    parts: tuple[PrefixPart, ...]
    choice: LoadChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPrefix(Action):
    """For the record: all that could be read is computed. Not answered."""

    request_id: RequestId
    choice: LoadChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBlocks(Action):
    """Write whole blocks, given as (own block, block at the target) → WritesDone | WritesFailed."""

    request_id: RequestId
    landing: Landing
    pairs: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """One slice of a step, and where its new bytes go."""

    slice: Slice
    landing: Landing | None  # None = nothing is sent, and no WritesDone comes
    send_from: int  # first token that is sent, at least slice.start
    complete: tuple[int, ...]  # indexes of the blocks whose checksum is wanted: complete after this step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(Action):
    """One forward pass → StepDone | StepGivenUp | StepFailed, and then WritesDone | WritesFailed for each slice that is
    sent."""

    plans: tuple[SlicePlan, ...]
    step_id: int = 0  # its place among the steps under way: a worker alone has one at a time
    max_wait_s: float | None = None
    """None: all that it needs is there. Else its only slice's prefix is arriving, and this is how long the engine may
    wait for layers of it, in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFirstToken(Action):
    """Tell the gateway. Not answered."""

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
    num_cached_blocks: int  # leading ones that the target had
    checksums: tuple[int, ...]  # of the others, in order
    timeout_s: float  # what is left of the request's time
    transfer_s: float  # since the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItem:
    """A block for the store."""

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
