"""What can happen to the conductor (events) and what follows (actions).

An event that is a call has exactly one reply among its actions: the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from conductor.decision import Decision
from protocol.errors import MoonserveError
from protocol.ids import InstanceId, RequestId, Role
from protocol.keys import BlockKey
from protocol.layout import KvLayout
from protocol.profile import DEFAULT_DECODE, DEFAULT_PREFILL, DecodeProfile, PrefillProfile
from protocol.request import Endpoint, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What an instance moved from or to one peer since its start, while enough was under way to measure."""

    peer: InstanceId
    read_bytes: int = 0
    read_s: float = 0.0  # in which a read was under way
    written_bytes: int = 0
    written_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Decode steps since the instance's start, as sums."""

    num_steps: int = 0
    seconds: float = 0.0
    sequences: float = 0.0
    context_tokens: float = 0.0


NO_STEPS = Steps()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an instance says about itself in a heartbeat."""

    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    leased_blocks: int = 0
    context_tokens: int = 0
    queued_tokens: int = 0
    num_preemptions: int = 0  # since its start
    traffic: tuple[Traffic, ...] = ()
    steps: Steps = NO_STEPS
    free_bytes: int = 0  # of a store's memory
    capacity_bytes: int = 0
    num_blocks: int = 0  # that a worker can hold at once, as limits are now; 0: as registered


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChanges:
    """Changes of the set of blocks that an instance can serve; see BlockEvents in conductor.proto."""

    first_seq: int
    next_seq: int
    added: tuple[tuple[BlockKey, BlockKey], ...] = ()
    removed: tuple[BlockKey, ...] = ()
    snapshot: bool = False


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """An instance joins. `layout`, `fingerprint` and the profiles concern workers only."""

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
    local_bytes_per_s: float = 0.0  # within its host, likewise
    can_switch_role: bool = False  # a worker that can change while it runs
    max_num_batched_tokens: int = 0  # prompt tokens of a prefill step at most; 0 = not told
    reads_prompts: bool = False  # a decode worker that can prefill what it decodes


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
    request_id: RequestId
    block_keys: tuple[BlockKey, ...]
    num_prompt_tokens: int
    max_tokens: int
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int = 0
    tenant: str = ""
    excluded_instances: frozenset[str] = frozenset()
    # Of the client; None = the chain of blocks tells the conversation.
    session_id: str | None = None
    client_id: str = ""  # under which the client knows the request; "" = by its id
    # Equal for equal requests of one client, so that one that comes back is known; b"" = it is not meant to be.
    ticket: bytes = b""


class Phase(StrEnum):
    """What happened to a placed request."""

    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    request_id: RequestId
    phase: Phase
    elapsed_s: float
    cached_tokens: int = 0
    output_tokens: int = 0
    # Of the first token, on the prefill worker's clock; None = not known.
    queue_s: float | None = None
    transfer_s: float | None = None  # by which its prefix delayed it
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed: leases may have run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """The conductor itself stood still for so long and could hear nobody."""

    seconds: float


Event = Register | Heartbeat | Deregister | Place | Report | Tick | Away

# ---- actions: notices


class Removal(StrEnum):
    """Why an instance is no longer in the cluster."""

    LEFT = "left"
    SILENT = "silent"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    instance_id: InstanceId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRemoved:
    instance_id: InstanceId
    role: Role
    reason: Removal


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftObserved:
    """The first token of a placed request arrived."""

    request_id: RequestId
    predicted_s: float
    actual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementForgotten:
    """Nobody reported the end of this placement in time; its predicted load is freed."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChangeDue:
    """This worker should take this role."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deregistered:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    placement: Placement
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """No instance can meet the SLO now."""

    predicted_ttft_s: float
    predicted_tbt_s: float
    retry_after_s: float
    reason: str
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The call cannot be served; the error says whose fault it is."""

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
    | Reported
    | Refused
)
