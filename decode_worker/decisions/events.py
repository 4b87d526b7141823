"""Events and actions of a decode worker. Times are monotonic seconds; block indexes count within a sequence.

`service` runs actions in order; the result of an action, if it has one, is an event (→).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from moonserve.engine.model.batch import Sampled, Slice
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import (
    NO_HINTS,
    BlockId,
    CacheHints,
    DecodeReport,
    Endpoint,
    GatewayId,
    LeaseId,
    Request,
    RequestId,
    Token,
)
from moonserve.worker.events import Action, Event
from moonserve.worker.events import Fail as Fail
from moonserve.worker.events import GatewayLost as GatewayLost
from moonserve.worker.events import MemoryChanged as MemoryChanged
from moonserve.worker.events import RequestCancelled as RequestCancelled
from moonserve.worker.events import StoreFound as StoreFound
from moonserve.worker.events import Tick as Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLease:
    """An event or action about one lease."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequested(PerLease, Event):
    """A prefill worker requests blocks for a prompt and waits for the answer until `deadline_at`."""

    request_id: RequestId  # the lease's holder
    num_tokens: int  # tokens whose KV will land
    block_keys: tuple[BlockKey, ...]  # keys of the full blocks of these tokens
    ttl_s: float
    deadline_at: float
    num_prompt_tokens: int | None = None  # how many of num_tokens are the client's prompt; None: all
    max_tokens: int | None = None  # limit of tokens generated after the prompt; None: as many as fit
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveWithdrawn(PerLease, Event):
    """No caller waits for this reservation any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed(PerLease, Event):
    """`CloseWindow` is done: no write under this lease is in flight, and none will come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(PerLease, Event):
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(PerLease, Event):
    """The holder gives up the lease. This can happen before the lease is granted or its reservation arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequested(PerLease, Event):
    """The prefill worker has written all KV. `request.token_ids` ends with the token that prefill sampled."""

    request: Request
    checksums: tuple[int, ...]  # one per sent block, in order; checksums of a block's parts are joined
    part_layers: tuple[int, ...] = ()  # number of layers in each part of a block; () = not in parts
    transfer_s: float = 0.0  # measured by the prefill worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(PerLease, Event):
    """`VerifyBlocks` is done."""

    corrupt: tuple[int, ...]  # block indexes
    checksums: tuple[int, ...] = ()  # checksums of whole blocks, if the commit had only those of parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """`RunStep` is done. `sampled` has one entry per slice; None if the slice does not sample."""

    sampled: Sequence[Sampled | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(Event):
    """The engine raised an error; the KV of the step's sequences is no longer valid."""

    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored(Event):
    """`KeepBlocks` has ended; the put no longer reads the blocks."""

    move_id: int
    checksums: tuple[int, ...]  # of the blocks; computed for this put where unknown
    is_complete: bool  # the store has all the blocks
    corrupt: tuple[BlockKey, ...] = ()  # keys whose data reached the store with another checksum
    num_bytes: int = 0  # bytes stored in `seconds`; after an error, bytes of all the blocks
    seconds: float = 0.0
    error: MoonserveError | None = None  # the put failed: the store is unreachable or too slow


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksLoaded(Event):
    """`LoadBlocks` has ended; the read no longer writes the blocks."""

    move_id: int
    checksums: tuple[int, ...]  # of the leading blocks that were read correctly; none after a failure
    num_bytes: int = 0  # bytes read in `seconds`; after a failure, bytes requested
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Event):
    """Draining is switched on (no new work, running work may finish) or off."""

    is_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """The worker stops; every request that has not finished fails."""


# -- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWindow(PerLease, Action):
    """Close the lease's write window, then move the landed blocks to where steps read them → WindowClosed."""

    landed: tuple[BlockId, ...] = ()  # (): the written data is discarded


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantLease(PerLease, Action):
    """Answer to Reserve. From now until CloseWindow peers may write the blocks that follow the cached ones."""

    blocks: tuple[BlockId, ...]  # all blocks of the sequence, in order
    num_cached: int  # leading blocks that already hold their KV and must not be written
    ttl_s: float


class LeaseCall(Enum):
    """RPCs of prefill workers that the state answers with an action."""

    RESERVE = auto()
    RENEW = auto()
    COMMIT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmRenewal(PerLease, Action):
    """Answer to Renew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommit(PerLease, Action):
    """Answer to Commit. Without corrupt blocks this worker now owns the request. Otherwise the corrupt blocks must be
    written again, and the lease stays open."""

    corrupt: tuple[int, ...] = ()  # block indexes within the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(PerLease, Action):
    """Error answer to an RPC about a lease."""

    call: LeaseCall
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedBlock:
    """A block that a peer wrote, with the checksum that its content must have."""

    index: int  # within the sequence
    block: BlockId
    num_tokens: int  # valid tokens; the rest of the block is undefined
    checksum: int
    part_layers: tuple[int, ...] = ()  # layers of each part whose checksum `checksum` joins; () = not in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBlocks(PerLease, Action):
    """Compare these blocks with their checksums → Verified."""

    request_id: RequestId
    blocks: tuple[LandedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(Action):
    """Run one forward pass → StepDone or StepFailed. The slices do not change before that event. Steps end in the order
    in which they were requested; two may be in flight."""

    slices: Sequence[Slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePhase:
    """A finished decode phase of one request, for tracing."""

    traceparent: str
    queued_at: float
    began_at: float
    num_tokens: int  # generated by this worker
    times_preempted: int
    num_draft_tokens: int = 0  # guessed and computed (`decisions.speculation`)
    num_accepted_tokens: int = 0  # of these, tokens that were right


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTokens(Action):
    """Send all tokens of one step to one gateway. `began` has a report per request whose first step here this was;
    `ended` has the phase of each traced request whose last token this is."""

    gateway_id: GatewayId
    tokens: list[Token]
    began: list[DecodeReport] = field(default_factory=list)
    ended: list[DecodePhase] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBlock:
    """A full block to be put into the store, with its key, parent key and checksum."""

    block: BlockId
    key: BlockKey
    parent: BlockKey | None  # None: first block of its chain
    checksum: int | None  # None: not known yet


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlocks(Action):
    """Put the given blocks into the store → Kept."""

    move_id: int
    store: Endpoint
    blocks: tuple[OffloadBlock, ...]
    hints: CacheHints = NO_HINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocks(Action):
    """Read the objects with the given keys from the store into the given blocks → BlocksLoaded."""

    move_id: int
    store: Endpoint
    keys: tuple[BlockKey, ...]
    blocks: tuple[BlockId, ...]
