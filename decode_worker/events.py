"""What can happen to a decode worker. Instants are monotonic seconds; block indexes count within a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Sampled
from protocol.errors import MoonserveError
from protocol.ids import LeaseId, RequestId
from protocol.keys import BlockKey
from protocol.request import Request
from worker.events import Event
from worker.events import GatewayLost as GatewayLost
from worker.events import MemoryChanged as MemoryChanged
from worker.events import RequestCancelled as RequestCancelled
from worker.events import StoreFound as StoreFound
from worker.events import Tick as Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequested(Event):
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
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveWithdrawn(Event):
    """Nobody waits for this reservation any more."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed(Event):
    """`CloseWindow` is done: no write under this lease is under way, and none will come."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event):
    lease_id: LeaseId
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(Event):
    """The holder gives the landing up; also before it was granted or seen."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequested(Event):
    """All KV has been written. `request.token_ids` ends with the token that prefill sampled."""

    lease_id: LeaseId
    request: Request
    checksums: tuple[int, ...]  # of the blocks that were sent, in order; of parts they are joined
    part_layers: tuple[int, ...] = ()  # layers that each of a block's checksums covers; () = all
    transfer_s: float = 0.0  # as the prefill worker measured it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(Event):
    """`VerifyBlocks` is done."""

    lease_id: LeaseId
    corrupt: tuple[int, ...]  # block indexes
    checksums: tuple[int, ...] = ()  # of the whole blocks, where the commit had only those of parts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """`RunStep` is done; one entry per slice, None where nothing was to be sampled."""

    sampled: Sequence[Sampled | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(Event):
    """The engine raised; the KV of the step's sequences cannot be trusted any more."""

    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Event):
    """`KeepBlocks` has ended; nothing reads the blocks any more."""

    move_id: int
    checksums: tuple[int, ...]  # of the blocks, as made here
    is_complete: bool  # the store has them all
    corrupt: tuple[BlockKey, ...] = ()  # arrived with another checksum
    num_bytes: int = 0  # that were sent in `seconds`
    seconds: float = 0.0
    error: MoonserveError | None = None  # the store could not be reached, or was too slow


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksLoaded(Event):
    """`LoadBlocks` has ended; nothing fills the blocks any more."""

    move_id: int
    checksums: tuple[int, ...]  # of the leading blocks that arrived well; none after a failure
    num_bytes: int = 0  # that were read in `seconds`
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Event):
    """No new work, what runs may finish; or new work is welcome again."""

    is_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Event):
    """What has not finished by now is failed."""
