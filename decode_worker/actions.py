"""What a decode worker wants done. `service` runs them in order; those with a result answer with an event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.batch import Slice
from protocol.errors import MoonserveError
from protocol.ids import BlockId, GatewayId, LeaseId, RequestId
from protocol.keys import BlockKey
from protocol.request import DecodeReport, Endpoint, Token
from worker.events import Action
from worker.events import Fail as Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWindow(Action):
    """Let nobody write under this lease any more, then bring what landed to where steps read it → WindowClosed."""

    lease_id: LeaseId
    landed: tuple[BlockId, ...] = ()  # (): nobody wants what was written


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantLease(Action):
    """Answer to Reserve. Peers may write the blocks behind the cached ones from now on, until CloseWindow."""

    lease_id: LeaseId
    blocks: tuple[BlockId, ...]  # all of the sequence, in order
    num_cached: int  # leading ones that hold their KV already and must not be written
    ttl_s: float


class Question(Enum):
    """Calls of prefill workers that the state answers with an action."""

    RESERVE = auto()
    RENEW = auto()
    COMMIT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmRenewal(Action):
    """Answer to Renew."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommit(Action):
    """Answer to Commit: the request is this worker's now; or, where blocks are corrupt, they must be written again, and
    the landing stays open."""

    lease_id: LeaseId
    corrupt: tuple[int, ...] = ()  # indexes within the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Action):
    """Answer to a call about a lease."""

    question: Question
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
class VerifyBlocks(Action):
    """Compare these blocks with their checksums → Verified."""

    request_id: RequestId
    lease_id: LeaseId
    blocks: tuple[LandedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(Action):
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
class SendTokens(Action):
    """All tokens of one step for one gateway. `began`: of those whose first step here it was; `ended`: of those that
    are traced and had their last."""

    gateway_id: GatewayId
    tokens: list[Token]
    began: list[DecodeReport] = field(default_factory=list)
    ended: list[DecodePhase] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlock:
    """A full block and what it is."""

    block: BlockId
    key: BlockKey
    parent: BlockKey | None  # None: its chain begins here
    checksum: int | None  # None: not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBlocks(Action):
    """Put these blocks into the store → Kept."""

    move_id: int
    store: Endpoint
    blocks: tuple[KeptBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocks(Action):
    """Read these keys into these blocks → BlocksLoaded."""

    move_id: int
    store: Endpoint
    keys: tuple[BlockKey, ...]
    blocks: tuple[BlockId, ...]
