"""What is simulated: machines, their number and roles, scheduler, limits, faults. Frozen data, checked once.

Everything that a result depends on is here or in the trace, so that equal specs and traces give equal results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from conductor.admission import Admission
from conductor.roles.controller import RoleTerms
from protocol.errors import ConfigError
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.step_budget import CHUNK_SHARE

# What a profile's file must keep to; `profiles` checks it where one is read.
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Factors = tuple[AboveZero, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What serving adds to computing and to moving KV, in seconds; each is measured where nothing else is under way."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    request_s: NotNegative = 0.0  # HTTP, keys, placement, submission, and the first token's way back
    gateway_s: NotNegative = 0.0  # of it, what a gateway works, by turns with all of the same moment
    back_s: NotNegative = 0.0  # of it, the first token's way back
    late_back_s: NotNegative = 0.0  # by which that takes longer while its machine goes on with another
    turnover_s: NotNegative = 0.0  # by which handing a prompt off delays the one right after it
    landing_s: NotNegative = 0.0  # from asking a decode machine for blocks to having them
    handoff_s: NotNegative = 0.0  # from a prompt's last chunk to its place in a decode step, KV aside


CROWDED_BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowding:
    """How many times as long a step takes while others on the same host compute: by their number, from 0 on, the last
    one also for more. What is empty for prefills as company is as beside a decode machine; all empty: each machine is a
    host of its own."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    prefill: Factors = ()  # beside others of which one decodes
    prefill_beside_prefills: Factors = ()  # beside others of which none does
    decode: Factors = ()  # of a step of one sequence
    # Of one of CROWDED_BATCH or more, since every token has a gateway and a client to wait for. Empty: as of one.
    decode_batch: Factors = ()
    # The overheads of a prompt, likewise: those who serve it wait for a processor too.
    request: Factors = ()
    request_beside_prefills: Factors = ()
    landing: Factors = ()
    landing_beside_prefills: Factors = ()
    # By the number of prefill machines that compute during it: the prompt's own is one when it goes on with the next.
    handoff: Factors = ()
    # How one step time reaches clients: gap ÷ mean gap in equal shares, shortest first, by the number of others.
    # Processes take turns on a processor, and who was away gets several tokens at once. Empty: gaps are steps' times.
    gaps: tuple[tuple[NotNegative, ...], ...] = ()


# Whose predictions reject: the conductor's three, and `late`, the baseline of arXiv 2407.00079 §7: by the prefill load
# on arrival, and by the decode load only when the prompt is computed, for nothing then.
LATE = "late"
ADMISSIONS = (*(each.value for each in Admission), LATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """One kind of machine with one model on it. Rates are per machine and direction."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1)]
    prefill: PrefillProfile
    decode: DecodeProfile
    kv_bytes_per_token: Count
    num_layers: Count
    nic_bytes_per_s: AboveZero  # between machines
    device_bytes_per_s: AboveZero  # between a machine's DRAM and its devices
    disk_bytes_per_s: AboveZero
    device_tokens: Count  # of KV that the devices hold beside the weights
    dram_tokens: Annotated[int, Field(ge=0)]  # of KV in a machine's part of the pool
    disk_tokens: Annotated[int, Field(ge=0)] = 0
    max_num_seqs: Count = 256  # per decoding machine
    max_model_len: Count = 131_072
    overheads: Overheads = Overheads()
    crowding: Crowding = Crowding()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One machine dies, or falls silent for a while; a dead one comes back empty but for its disk."""

    instance: str  # "prefill-3"
    at_s: float
    for_s: float | None = None  # None: for good
    silent: bool = False  # goes on computing, says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster of prefill and decode machines (or, with `coupled`, of machines that do both) and how it is run."""

    model: ModelProfile
    num_prefill: int
    num_decode: int
    policy: str = "global-cache-aware"
    balancing_threshold: float = 1.25
    admission: str = "predicted"  # one of ADMISSIONS
    # Whether decode machines refuse a prompt at its handoff that would make steps too long; `late` always does. The
    # report has it as the local scheduler's double-check (arXiv 2407.00079, §3); live workers take what was placed.
    double_check: bool = False
    tenant_weights: tuple[tuple[str, float], ...] = ()  # 1 where not given
    scheduling_policy: str = "fcfs"  # of the prefill machines; or priority
    eviction: str = "lru"
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    block_size: int = 512
    heartbeat_interval_s: float = 1.0
    # Machines that prefill one prompt together (CPP); num_prefill counts groups.
    prefill_group: int = 1
    chunk_tokens: int = 8192
    mixes_prompts: bool = False  # short prompts share steps, as on live workers
    pool: str = "global"  # global | local: whether prefixes are read from other machines
    seed: int = 0
    faults: tuple[Fault, ...] = field(default=())
    roles: RoleTerms | None = None  # None: machines keep theirs
    # Whether decode machines prefill a prompt themselves where that is sooner (docs/conditional-disaggregation.md).
    conditional: bool = False
    chunk_share: float = CHUNK_SHARE  # of the TBT objective, what steps with chunks take then
    role_drain_s: float = 30.0  # what a machine has under way gets to finish before it changes
    sample_interval_s: float = 30.0  # of instances and replicas
    num_ranks: int = 100  # of the most popular blocks, whose replicas are counted

    def check(self) -> None:
        """Raises ConfigError that says what to change."""
        if self.num_prefill < 1 or self.num_decode < 1:
            raise ConfigError("--prefill and --decode must be at least 1")
        if self.admission not in ADMISSIONS:
            raise ConfigError(f"--admission is {self.admission!r}; one of {', '.join(ADMISSIONS)}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(f"--scheduling-policy is {self.scheduling_policy!r}; fcfs or priority")
        if self.pool not in ("global", "local"):
            raise ConfigError(f"--pool is {self.pool!r}; global or local")
        if min(self.ttft_slo_s, self.tbt_slo_s, self.heartbeat_interval_s) <= 0:
            raise ConfigError("SLOs and the heartbeat interval must be above 0")
        if self.block_size < 1 or self.prefill_group < 1 or self.chunk_tokens < 1:
            raise ConfigError("--block-size, --prefill-group and --chunk-tokens must be at least 1")
        if self.roles is not None and self.conditional:
            raise ConfigError("--role-switching and --conditional-disaggregation exclude each other")
        if self.roles is not None and (self.faults or self.prefill_group > 1):
            raise ConfigError("--role-switching goes neither with --faults nor with --prefill-group")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledSpec:
    """Machines that prefill and decode in the same batch, as vLLM runs them; requests go to the shortest queue."""

    policy: ClassVar[str] = "coupled"
    model: ModelProfile
    num_instances: int
    prefix_caching: bool = False  # in device memory, of the machine alone
    chunked_prefill: bool = False
    max_num_batched_tokens: int = 2048  # of a step, with chunked prefill
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    block_size: int = 512
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError that says what to change."""
        if self.num_instances < 1 or self.block_size < 1 or self.max_num_batched_tokens < 1:
            raise ConfigError("--coupled, --block-size and --max-num-batched-tokens must be at least 1")
        if min(self.ttft_slo_s, self.tbt_slo_s) <= 0:
            raise ConfigError("SLOs must be above 0")
