"""Events of a prefill worker: the input of `state.PrefillState.handle`. Pure data.

Success, refusal and failure of the same operation are different events. An event names its operation by the request id
or, if a request can have several such operations, by the operation's own number.
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
    num_cached_blocks: int  # leading blocks that already hold their KV
    transfer_address: str
    segment_id: int
    window_id: int
    num_blocks: int  # size of the target pool
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingGranted(Event):
    """Answer to ReserveLanding."""

    request_id: RequestId
    landing: Landing


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingRefused(Event):
    """Answer to ReserveLanding: refused, decode worker unreachable, or withdrawn by WithdrawReservation."""

    request_id: RequestId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingLost(Event):
    """A renewal failed because the lease has ended."""

    request_id: RequestId
    lease_id: LeaseId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """Result of reading one part of a prefix."""

    store: Endpoint
    num_bytes: int  # bytes that arrived; after a failure, bytes requested
    seconds: float
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixProgress(Event):
    """Progress of a LoadPrefix by layer: the first `num_layers` layers of the `num_blocks` leading blocks are in the
    pool. They are not verified yet."""

    request_id: RequestId
    num_blocks: int  # blocks that the stores have; may be fewer than requested, at least 1
    num_layers: int
    layers_at_once: int  # layers per turn
    of_layers: int  # layers in all
    seconds: float  # time taken to read these layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoaded(Event):
    """Answer to LoadPrefix: the leading blocks, one per checksum, arrived and matched these checksums of the store."""

    request_id: RequestId
    checksums: tuple[int, ...]
    reads: tuple[PartRead, ...] = ()  # one per leading part that was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoadFailed(Event):
    """Answer to LoadPrefix: no usable block arrived, and the load no longer writes to the blocks."""

    request_id: RequestId
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
class WritesDone(Event):
    """All writes of one SendBlocks, or of one slice of a step, have arrived. Comes after the step's own answer."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesFailed(Event):
    """A write of one SendBlocks, or of one slice of a step, failed. None of the writes reads its source any more."""

    request_id: RequestId
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffAccepted(Event):
    """Answer to CommitHandoff: the decode worker now owns the sequence."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCorrupt(Event):
    """Answer to CommitHandoff: blocks did not match their checksums. `indexes` count in the sequence's block table."""

    request_id: RequestId
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFailed(Event):
    """Answer to CommitHandoff: refused, or the decode worker is unreachable."""

    request_id: RequestId
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
