"""Events, the inputs of the conductor state, and actions, its outputs.

An event that is a call has exactly one reply among its actions: the last one.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from moonserve.conductor.placement.decision import Decision
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import BlockKey, KvLayout
from moonserve.protocol.request import Endpoint, InstanceId, Placement, RequestId, RequestPhase, Role
from moonserve.protocol.step_time import DEFAULT_DECODE, DEFAULT_PREFILL, DecodeProfile, PrefillProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficTotals:
    """Bytes that an instance moved from or to one peer since its start, while enough was in flight to measure."""

    peer: InstanceId
    read_bytes: int = 0
    read_s: float = 0.0  # time in which a read was in flight
    written_bytes: int = 0
    written_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sums over all decode steps since the instance's start."""

    num_steps: int = 0
    seconds: float = 0.0
    sequences: float = 0.0
    context_tokens: float = 0.0


NO_STEPS = StepTotals()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load that an instance reports in a heartbeat."""

    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    leased_blocks: int = 0
    context_tokens: int = 0
    queued_tokens: int = 0
    num_preemptions: int = 0  # since its start
    traffic: tuple[TrafficTotals, ...] = ()
    steps: StepTotals = NO_STEPS
    free_bytes: int = 0  # of a store's memory
    capacity_bytes: int = 0
    num_blocks: int = 0  # that a worker can hold at once under its current limits; 0 = as registered


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChanges:
    """Changes to the set of blocks that an instance can serve; see BlockEvents in conductor.proto."""

    first_seq: int
    next_seq: int
    added: tuple[tuple[BlockKey, BlockKey], ...] = ()
    removed: tuple[BlockKey, ...] = ()
    snapshot: bool = False


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """An instance joins. `layout`, `fingerprint` and the profiles apply to workers only."""

    endpoint: Endpoint
    role: Role
    layout: KvLayout | None = None
    fingerprint: str = ""
    num_blocks: int = 0
    prefill_profile: PrefillProfile = DEFAULT_PREFILL
    decode_profile: DecodeProfile = DEFAULT_DECODE
    home_store: InstanceId | None = None
    max_num_seqs: int = 0  # 0 = unlimited
    max_model_len: int = 0
    bytes_per_s: float = 0.0  # 0 = not measured
    local_bytes_per_s: float = 0.0  # within its host; 0 = not measured
    can_switch_role: bool = False  # the worker can change its role while it runs
    max_num_batched_tokens: int = 0  # most prompt tokens in a prefill step; 0 = not reported
    reads_prompts: bool = False  # a decode worker that can prefill its own prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    instance_id: InstanceId
    epoch: int
    load: Load
    changes: BlockChanges | None = None
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deregister:
    instance_id: InstanceId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A gateway requests a placement."""

    request_id: RequestId
    block_keys: tuple[BlockKey, ...]
    num_prompt_tokens: int
    max_tokens: int
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int = 0
    tenant: str = ""
    excluded_instances: frozenset[str] = frozenset()
    session_id: str | None = None  # given by the client; None = the chain of blocks identifies the conversation
    expected_return: str = ""  # of the session's next request, and its source, for the record
    client_id: str = ""  # the client's name for the request; "" = its id
    ticket: bytes = b""  # equal for equal requests of one client, to recognize a retry; b"" = none
    is_redirected: bool = False  # another active conductor sent it here


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A gateway reports the progress or end of a placed request."""

    request_id: RequestId
    phase: RequestPhase
    elapsed_s: float
    cached_tokens: int = 0
    output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Parts of the TTFT, on the prefill worker's clock; None = unknown.
    queue_s: float | None = None
    transfer_s: float | None = None  # delay by the prefix load and the grant of the landing
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; leases may have expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """The conductor itself was suspended for this long and received no messages."""

    seconds: float


Event = Register | Heartbeat | Deregister | Place | Report | Tick | Suspended

# ---- actions: notices


class RemovalReason(StrEnum):
    """Reason for the removal of an instance."""

    LEFT = "left"
    SILENT = "silent"
    REPLACED = "replaced"
    MOVED = "moved to another conductor"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    instance_id: InstanceId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRemoved:
    instance_id: InstanceId
    role: Role
    reason: RemovalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftObserved:
    """The first token of a placed request arrived."""

    request_id: RequestId
    predicted_s: float
    actual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementForgotten:
    """A placement expired because its end was not reported in time; its predicted load is removed."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChangeDue:
    """A worker should change to this role."""

    endpoint: Endpoint
    role: Role


# ---- actions: replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    heartbeat_interval_s: float
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatSeen:
    known: bool
    resync: bool = False
    move_to: str = ""  # address of the conductor where the instance should register instead; "" = stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Deregistered:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    placement: Placement
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The request is rejected, by its objectives or in favour of other requests, and may return later."""

    predicted_ttft_s: float
    predicted_tbt_s: float
    retry_after_s: float
    reason: str
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirected:
    """Another active conductor should place the request."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The call cannot be served, for the reason given by the error."""

    error: MoonserveError = field(compare=False)


Action = (
    InstanceJoined
    | InstanceRemoved
    | TtftObserved
    | PlacementForgotten
    | RoleChangeDue
    | Registered
    | HeartbeatSeen
    | Deregistered
    | Placed
    | Rejected
    | Redirected
    | Reported
    | Refused
)
