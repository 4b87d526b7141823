"""What can happen to a prefill worker. Input of `state.PrefillState.handle`; pure data.

Success, refusal and failure of the same operation are different events. Operations carry the request id, or, where
one request can have several, their own number.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import Sampled
from protocol.errors import MoonserveError
from protocol.ids import BlockId, LeaseId, RequestId
from protocol.keys import BlockKey
from protocol.request import Endpoint
from worker.events import Event
from worker.events import GatewayLost as GatewayLost
from worker.events import MemoryChanged as MemoryChanged
from worker.events import RequestCancelled as RequestCancelled
from worker.events import StoreFound as StoreFound
from worker.events import Submitted as Submitted
from worker.events import Tick as Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Blocks of a decode worker's pool that were leased for one sequence."""

    lease_id: LeaseId
    block_ids: tuple[BlockId, ...]  # all blocks of the sequence, in order
    num_cached_blocks: int  # leading ones that already hold their KV
    transfer_address: str
    segment_id: int
    window_id: int
    num_blocks: int  # of the target pool
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingGranted(Event):
    """Answer to ReserveLanding."""

    request_id: RequestId
    landing: Landing


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingRefused(Event):
    """Answer to ReserveLanding: refused, not reachable, or withdrawn by WithdrawReservation."""

    request_id: RequestId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingLost(Event):
    """A lease that was held could not be renewed."""

    request_id: RequestId
    lease_id: LeaseId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """How the reading of one part of a prefix went."""

    store: Endpoint
    num_bytes: int  # that arrived, or, when it failed, that were wanted
    seconds: float
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixProgress(Event):
    """On the way to the answer to LoadPrefix by layer: the first `num_layers` layers of the `num_blocks` leading
    blocks are in the pool. Nothing is verified yet."""

    request_id: RequestId
    num_blocks: int  # that the stores have, which may be fewer than were asked for; at least 1
    num_layers: int
    layers_at_once: int  # that arrive together
    of_layers: int
    seconds: float  # that reading these layers took


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoaded(Event):
    """Answer to LoadPrefix: this many leading blocks arrived and matched these checksums of the store."""

    request_id: RequestId
    checksums: tuple[int, ...]
    reads: tuple[PartRead, ...] = ()  # of the leading parts, as far as they were tried


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoadFailed(Event):
    """Answer to LoadPrefix: nothing usable arrived, and nothing will be written to the blocks any more."""

    request_id: RequestId
    error: MoonserveError
    reads: tuple[PartRead, ...] = ()  # of the leading parts, as far as they were tried


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDone:
    """One slice of a finished step."""

    request_id: RequestId
    sampled: Sampled | None
    checksums: tuple[tuple[int, int], ...]  # (index in the block table, checksum) of completed blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """Answer to RunStep."""

    slices: tuple[SliceDone, ...]
    step_id: int = 0
    waited_s: float = 0.0  # of the engine, for layers of a prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGivenUp(Event):
    """Answer to RunStep with `max_wait_s`: layers of the prefix did not come in time, or will not. Nothing of it
    counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(Event):
    """Answer to RunStep: the engine raised; what its slices computed is unknown."""

    error: MoonserveError
    step_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesDone(Event):
    """All transfers of one SendBlocks, or of one slice of a step, arrived. Comes after that step's StepDone."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesFailed(Event):
    """As WritesDone, but some transfer failed. None of them reads the source any more."""

    request_id: RequestId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffAccepted(Event):
    """Answer to CommitHandoff: the decode worker goes on with the sequence."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCorrupt(Event):
    """Answer to CommitHandoff: these blocks (indexes in the sequence's table) did not match their checksums."""

    request_id: RequestId
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFailed(Event):
    """Answer to CommitHandoff: refused or not reachable."""

    request_id: RequestId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class PutDone(Event):
    """Answer to PutBlocks. `corrupt` keys did not match at the store; `num_refused` found no space."""

    put_id: int
    num_refused: int
    corrupt: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutFailed(Event):
    """Answer to PutBlocks: the store was not reachable. Nothing reads the source any more."""

    put_id: int
    error: MoonserveError
