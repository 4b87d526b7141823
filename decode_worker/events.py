"""Events of a decode worker. Times are monotonic seconds; block indexes count within a sequence."""

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
    """A prefill worker requests blocks for a prompt and waits for the answer until `deadline_at`."""

    lease_id: LeaseId
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
class ReserveWithdrawn(Event):
    """No caller waits for this reservation any more."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed(Event):
    """`CloseWindow` is done: no write under this lease is in flight, and none will come."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event):
    lease_id: LeaseId
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(Event):
    """The holder gives up the lease. This can happen before the lease is granted or its reservation arrives."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequested(Event):
    """The prefill worker has written all KV. `request.token_ids` ends with the token that prefill sampled."""

    lease_id: LeaseId
    request: Request
    checksums: tuple[int, ...]  # one per sent block, in order; checksums of a block's parts are joined
    part_layers: tuple[int, ...] = ()  # number of layers in each part of a block; () = not in parts
    transfer_s: float = 0.0  # measured by the prefill worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(Event):
    """`VerifyBlocks` is done."""

    lease_id: LeaseId
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
class Kept(Event):
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
