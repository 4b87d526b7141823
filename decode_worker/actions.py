"""What a decode worker wants done. `service` runs them in order; those with a result answer with an event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import Slice
from protocol.errors import MoonserveError
from protocol.ids import BlockId, GatewayId, LeaseId, RequestId
from protocol.keys import BlockKey
from protocol.request import DecodeReport, Endpoint, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWindow:
    """Let peers write these blocks → WindowOpened."""

    lease_id: LeaseId
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWindow:
    """Let nobody write under this window any more, then bring what landed to where steps read it → WindowClosed."""

    lease_id: LeaseId
    window_id: int
    landed: tuple[BlockId, ...] = ()  # (): nobody wants what was written


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantLease:
    """Answer to Reserve."""

    lease_id: LeaseId
    blocks: tuple[BlockId, ...]  # all of the sequence, in order
    num_cached: int  # leading ones that hold their KV already and must not be written
    window_id: int | None  # None: nothing is to be written
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseLease:
    """Answer to Reserve."""

    lease_id: LeaseId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmRenewal:
    """Answer to Renew."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseRenewal:
    """Answer to Renew."""

    lease_id: LeaseId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedBlock:
    """A block that a peer wrote and what it should contain."""

    index: int  # within the sequence
    block: BlockId
    num_tokens: int  # valid ones; the rest of the block is undefined
    checksum: int
    part_layers: tuple[int, ...] = ()  # `checksum` joins those of so many layers each; () = one


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBlocks:
    """Compare these blocks with their checksums → Verified."""

    request_id: RequestId
    lease_id: LeaseId
    blocks: tuple[LandedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptCommit:
    """Answer to Commit: the request is this worker's now."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCorrupt:
    """Answer to Commit: these blocks must be written again; the landing stays open."""

    lease_id: LeaseId
    corrupt: tuple[int, ...]  # indexes within the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectCommit:
    """Answer to Commit."""

    lease_id: LeaseId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """One forward pass → StepDone or StepFailed. The slices change again only after that event. Steps end in the order
    in which they were asked for; there may be two under way."""

    slices: Sequence[Slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePhase:
    """A whole one, for traces."""

    traceparent: str
    queued_at: float
    began_at: float
    num_tokens: int  # generated here
    times_preempted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTokens:
    """All tokens of one step for one gateway. `began`: of those whose first step here it was; `ended`: of those that
    are traced and had their last."""

    gateway_id: GatewayId
    tokens: list[Token]
    began: list[DecodeReport] = field(default_factory=list)
    ended: list[DecodePhase] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """A request ends without a finish reason; its gateway must know why."""

    gateway_id: GatewayId
    request_id: RequestId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlock:
    """A full block and what it is."""

    block: BlockId
    key: BlockKey
    parent: BlockKey | None  # None: its chain begins here
    checksum: int | None  # None: not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBlocks:
    """Put these blocks into the store → Kept."""

    move_id: int
    store: Endpoint
    blocks: tuple[KeptBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocks:
    """Read these keys into these blocks → BlocksLoaded."""

    move_id: int
    store: Endpoint
    keys: tuple[BlockKey, ...]
    blocks: tuple[BlockId, ...]


Action = (
    OpenWindow
    | CloseWindow
    | GrantLease
    | RefuseLease
    | ConfirmRenewal
    | RefuseRenewal
    | VerifyBlocks
    | AcceptCommit
    | ReportCorrupt
    | RejectCommit
    | RunStep
    | SendTokens
    | Fail
    | KeepBlocks
    | LoadBlocks
)
