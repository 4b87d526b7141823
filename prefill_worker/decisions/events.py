"""Events and actions of a prefill worker: the input and the output of `state.PrefillState.handle`. Pure data.

Success, refusal and failure of the same operation are different events. An event names its operation by the request id
or, if a request can have several such operations, by the operation's own number. An action that starts an operation
names the events that answer it (→). Exactly one of them comes, even if the operation is withdrawn.
"""

from dataclasses import dataclass

from moonserve.engine.model.batch import Sampled, Slice
from moonserve.prefill_worker.decisions.load_or_compute import LoadChoice
from moonserve.prefill_worker.decisions.load_or_compute import PartRead as PartRead
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import (
    NO_HINTS,
    BlockId,
    CacheHints,
    Endpoint,
    GatewayId,
    LeaseId,
    PrefillReport,
    Request,
    RequestId,
    Token,
)
from moonserve.worker.events import Action, Event, PerRequest
from moonserve.worker.events import Fail as Fail
from moonserve.worker.events import GatewayLost as GatewayLost
from moonserve.worker.events import MemoryChanged as MemoryChanged
from moonserve.worker.events import RequestCancelled as RequestCancelled
from moonserve.worker.events import StoreFound as StoreFound
from moonserve.worker.events import Submitted as Submitted
from moonserve.worker.events import Tick as Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Blocks of a decode worker's pool that were leased for one sequence."""

    lease_id: LeaseId
    block_ids: tuple[BlockId, ...]  # all blocks of the sequence, in order
    num_cached_blocks: int  # leading blocks that already hold their KV
    transfer_address: str
    segment_id: int
    window_id: int
    num_blocks: int  # size of the target pool
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingGranted(PerRequest, Event):
    """Answer to ReserveLanding."""

    landing: Landing


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingRefused(PerRequest, Event):
    """Answer to ReserveLanding: refused, decode worker unreachable, or withdrawn by WithdrawReservation."""

    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingLost(PerRequest, Event):
    """A renewal failed because the lease has ended."""

    lease_id: LeaseId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixProgress(PerRequest, Event):
    """Progress of a LoadPrefix by layer: the first `num_layers` layers of the `num_blocks` leading blocks are in the
    pool. They are not verified yet."""

    num_blocks: int  # blocks that the stores have; may be fewer than requested, at least 1
    num_layers: int
    layers_at_once: int  # layers per turn
    of_layers: int  # layers in all
    seconds: float  # time taken to read these layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoaded(PerRequest, Event):
    """Answer to LoadPrefix: the leading blocks, one per checksum, arrived and matched these checksums of the store."""

    checksums: tuple[int, ...]
    reads: tuple[PartRead, ...] = ()  # one per leading part that was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoadFailed(PerRequest, Event):
    """Answer to LoadPrefix: no usable block arrived, and the load no longer writes to the blocks."""

    error: MoonserveError
    reads: tuple[PartRead, ...] = ()  # one per leading part that was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDone:
    """Result of one slice of a finished step."""

    request_id: RequestId
    sampled: Sampled | None
    checksums: tuple[tuple[int, int], ...]  # (index in the block table, checksum) of completed blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """Answer to RunStep."""

    slices: tuple[SliceDone, ...]
    step_id: int = 0
    waited_s: float = 0.0  # time that the engine waited for layers of a prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGivenUp(Event):
    """Answer to RunStep with `max_wait_s`: layers of the prefix did not arrive in time, or will not arrive. No result
    of the step counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(Event):
    """Answer to RunStep: the engine raised an error; the KV of the step's slices is undefined."""

    error: MoonserveError
    step_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesDone(PerRequest, Event):
    """All writes of one SendBlocks, or of one slice of a step, have arrived. Comes after the step's own answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesFailed(PerRequest, Event):
    """A write of one SendBlocks, or of one slice of a step, failed. None of the writes reads its source any more."""

    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffAccepted(PerRequest, Event):
    """Answer to CommitHandoff: the decode worker now owns the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCorrupt(PerRequest, Event):
    """Answer to CommitHandoff: blocks did not match their checksums. `indexes` count in the sequence's block table."""

    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFailed(PerRequest, Event):
    """Answer to CommitHandoff: refused, or the decode worker is unreachable."""

    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class PutDone(Event):
    """Answer to PutBlocks. `corrupt` lists keys that failed the store's checksum test; `num_refused` blocks got no
    space."""

    put_id: int
    num_refused: int
    corrupt: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutFailed(Event):
    """Answer to PutBlocks: the put failed. It no longer reads the source blocks."""

    put_id: int
    error: MoonserveError


# -- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveLanding(PerRequest, Action):
    """Lease blocks on the decode worker → LandingGranted | LandingRefused."""

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
class WithdrawReservation(PerRequest, Action):
    """Cancel the ReserveLanding in flight, which still answers. Not answered itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLanding(PerRequest, Action):
    """Release a lease, or make sure that it is not granted later. Not answered."""

    decode: Endpoint
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPart:
    """Keys of blocks that one store may hold on disk."""

    store: Endpoint
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPrefix(PerRequest, Action):
    """Request stores to load from disk to memory the blocks that a waiting request will read. Not answered."""

    parts: tuple[PrefetchPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPart:
    """Blocks to read from one store."""

    store: Endpoint
    keys: tuple[BlockKey, ...]
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPrefix(PerRequest, Action):
    """Read prefix blocks into the own pool → PrefixLoaded | PrefixLoadFailed. Parts are read in order. If
    `choice.layers_at_once` is set, that many layers of all parts are read per turn, with a PrefixProgress each."""

    parts: tuple[PrefixPart, ...]
    choice: LoadChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPrefix(PerRequest, Action):
    """Log that the whole prefix is computed although stores hold parts of it. Not answered."""

    choice: LoadChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBlocks(PerRequest, Action):
    """Write whole blocks to the target. `pairs`: (own block, block at the target) → WritesDone | WritesFailed."""

    landing: Landing
    pairs: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """One slice of a step, and the landing blocks that its new KV is written to."""

    slice: Slice
    landing: Landing | None  # None = nothing is sent, and no WritesDone comes, unless SendStep follows
    send_from: int  # first token that is sent; earlier than slice.start if earlier steps had no landing
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
class SendStep(Action):
    """Write the KV of the step in flight, whose only slice began without a landing, and the earlier tokens from
    `send_from` on → WritesDone | WritesFailed behind the step's own result."""

    landing: Landing
    send_from: int


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
    hints: CacheHints = NO_HINTS  # with the expected return if it is the last one of its request


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBlocks(Action):
    """Write blocks to the home store → PutDone | PutFailed."""

    put_id: int
    store: Endpoint
    items: tuple[PutItem, ...]
