"""What can happen to a decode worker. Instants are monotonic seconds; block indexes count within a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Sampled
from protocol.errors import MoonserveError
from protocol.ids import GatewayId, LeaseId, RequestId
from protocol.keys import BlockKey
from protocol.request import Endpoint, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequested:
    """A prefill worker wants blocks for a prompt; it waits for the answer until `deadline_at`."""

    lease_id: LeaseId
    request_id: RequestId  # the lease's holder
    num_tokens: int  # whose KV will land
    block_keys: tuple[BlockKey, ...]  # of the full blocks among them
    ttl_s: float
    deadline_at: float
    num_prompt_tokens: int | None = None  # of num_tokens, the client's; None: all
    max_tokens: int | None = None  # that may be generated behind these; None: as many as fit
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveWithdrawn:
    """Nobody waits for this reservation any more."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOpened:
    """`OpenWindow` is done: peers may write the lease's blocks."""

    lease_id: LeaseId
    window_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed:
    """`CloseWindow` is done: no write under this lease is under way, and none will come."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed:
    lease_id: LeaseId
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased:
    """The holder gives the landing up; also before it was granted or seen."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequested:
    """All KV has been written. `request.token_ids` ends with the token that prefill sampled."""

    lease_id: LeaseId
    request: Request
    checksums: tuple[int, ...]  # of the blocks that were sent, in order; of parts they are joined
    part_layers: tuple[int, ...] = ()  # layers that each of a block's checksums covers; () = all
    transfer_s: float = 0.0  # as the prefill worker measured it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """`VerifyBlocks` is done."""

    lease_id: LeaseId
    corrupt: tuple[int, ...]  # block indexes
    checksums: tuple[int, ...] = ()  # of the whole blocks, where the commit had only those of parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """`RunStep` is done; one entry per slice, None where nothing was to be sampled."""

    sampled: Sequence[Sampled | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The engine raised; the KV of the step's sequences cannot be trusted any more."""

    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFound:
    """The home store can be reached (again); a new epoch is an empty store."""

    store: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`KeepBlocks` has ended; nothing reads the blocks any more."""

    move_id: int
    checksums: tuple[int, ...]  # of the blocks, as made here
    is_complete: bool  # the store has them all
    corrupt: tuple[BlockKey, ...] = ()  # arrived with another checksum
    num_bytes: int = 0  # that were sent in `seconds`
    seconds: float = 0.0
    error: MoonserveError | None = None  # the store could not be reached, or was too slow


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksLoaded:
    """`LoadBlocks` has ended; nothing fills the blocks any more."""

    move_id: int
    checksums: tuple[int, ...]  # of the leading blocks that arrived well; none after a failure
    num_bytes: int = 0  # that were read in `seconds`
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The gateway does not want this request any more; it may not have arrived yet."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLost:
    gateway_id: GatewayId


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """No new work; what runs may finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded:
    """New work is welcome again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What has not finished by now is failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChanged:
    """There may be memory for more blocks, or only for fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The instant `DecodeState.wake_at` has come."""


Event = (
    ReserveRequested
    | ReserveWithdrawn
    | WindowOpened
    | WindowClosed
    | LeaseRenewed
    | LeaseReleased
    | CommitRequested
    | Verified
    | StepDone
    | StepFailed
    | StoreFound
    | Kept
    | BlocksLoaded
    | RequestCancelled
    | GatewayLost
    | DrainStarted
    | DrainEnded
    | Stopped
    | MemoryChanged
    | Tick
)
