"""Description of a simulated system: machines, roles, scheduler, limits, faults. Frozen data, checked once.

A result depends only on this and the trace: equal specs and traces give equal results.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from moonserve.conductor.placement.admission import AdmissionMode
from moonserve.conductor.role_switching import RoleThresholds
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.step_time import CHUNK_SHARE, DecodeProfile, PrefillProfile

# Constraints on a profile's file. `profiles` checks them when it reads one.
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Factors = tuple[AboveZero, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Time that serving adds to computing and to transferring KV, in seconds. Each is measured on an idle cluster."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    request_s: NotNegative = 0.0  # HTTP, keys, placement, submission, and the first token's way back
    gateway_s: NotNegative = 0.0  # part of `request_s`: work of the gateway, shared evenly by simultaneous requests
    back_s: NotNegative = 0.0  # part of `request_s`: the first token's way back
    late_back_s: NotNegative = 0.0  # added to `back_s` while the machine continues with another prompt
    turnover_s: NotNegative = 0.0  # delay of the next prompt by handing off the one before it
    landing_s: NotNegative = 0.0  # for which an idle prefill machine waits for its landing
    handoff_s: NotNegative = 0.0  # from a prompt's last chunk to its first decode step, without the KV transfer


CROWDED_BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowding:
    """Slowdown factors of a step while other machines on the host compute, indexed by their number from 0; the last one
    applies to more. An empty `*_beside_prefills` is as beside a decode machine. All empty: each machine has its own
    host."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    prefill: Factors = ()  # next to others of which at least one decodes
    prefill_beside_prefills: Factors = ()  # next to others of which none decodes
    decode: Factors = ()  # for a step of one sequence
    # For a step of CROWDED_BATCH or more, since every token waits for a gateway and a client. Empty: like `decode`.
    decode_batch: Factors = ()
    # For the overheads of a prompt: the processes that serve it wait for a processor too.
    request: Factors = ()
    request_beside_prefills: Factors = ()
    landing: Factors = ()
    landing_beside_prefills: Factors = ()
    # Indexed by the number of prefill machines that compute during it, including the prompt's own if it has another
    # prompt.
    handoff: Factors = ()
    # Gap ÷ mean gap by the number of others, in equal shares, shortest first. Processes take turns on a processor, and
    # a client that waited gets several tokens at once. Empty: gaps are step times.
    gaps: tuple[tuple[NotNegative, ...], ...] = ()


# Predictions that may reject a request: the conductor's three, and `late`, the baseline of arXiv 2407.00079 §7. It uses
# the prefill load on arrival, and the decode load only after computing the prompt, which a rejection wastes.
LATE = "late"
ADMISSIONS = (*(each.value for each in AdmissionMode), LATE)


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
    device_tokens: Count  # of KV that the devices hold in addition to the weights
    dram_tokens: Annotated[int, Field(ge=0)]  # of KV in a machine's part of the pool
    disk_tokens: Annotated[int, Field(ge=0)] = 0
    max_num_seqs: Count = 256  # per decoding machine
    max_model_len: Count = 131_072
    fills_steps: bool = False  # the next prompts fill every prefill step, as in vLLM
    overheads: Overheads = Overheads()
    crowding: Crowding = Crowding()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A machine dies or falls silent, possibly for a time. A dead one returns empty except for its disk."""

    instance: str  # "prefill-3"
    at_s: float
    for_s: float | None = None  # None = permanently
    silent: bool = False  # continues to compute, sends no heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster of prefill and decode machines, and its configuration."""

    model: ModelProfile
    num_prefill: int
    num_decode: int
    policy: str = "global-cache-aware"
    balancing_threshold: float = 1.25
    admission: str = "predicted"  # one of ADMISSIONS
    # True if decode machines reject a prompt at its handoff that would make steps too long; always so with `late`. The
    # report's local scheduler does so (double-check, arXiv 2407.00079, §3). Live workers accept all placed requests.
    double_check: bool = False
    tenant_weights: tuple[tuple[str, float], ...] = ()  # default 1
    scheduling_policy: str = "fcfs"  # of the prefill machines: fcfs or priority
    eviction: str = "lru"
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    block_size: int = 512
    heartbeat_interval_s: float = 1.0
    # Machines that prefill one prompt together (CPP); num_prefill counts groups.
    prefill_group: int = 1
    chunk_tokens: int = 8192
    mixes_prompts: bool = False  # short prompts share steps, as on live workers
    pool: str = "global"  # global or local: prefixes are read from all machines or only from the own one
    seed: int = 0
    faults: tuple[Fault, ...] = field(default=())
    roles: RoleThresholds | None = None  # None = fixed roles
    # True if decode machines may prefill a prompt if that is sooner (docs/conditional-disaggregation.md).
    conditional: bool = False
    chunk_share: float = CHUNK_SHARE  # then: share of the TBT objective that steps with chunks may take
    role_drain_s: float = 30.0  # time for requests in flight to finish before a role change
    sample_interval_s: float = 30.0  # of instances and replicas
    num_ranks: int = 100  # number of most popular blocks whose replicas are counted

    def check(self) -> None:
        """Raises ConfigError with the options to change."""
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
    """Machines that prefill and decode in the same batch, as vLLM does. Requests go to the shortest queue."""

    policy: ClassVar[str] = "coupled"
    model: ModelProfile
    num_instances: int
    prefix_caching: bool = False  # in the device memory of each machine
    chunked_prefill: bool = False
    max_num_batched_tokens: int = 2048  # per step, with chunked prefill
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    block_size: int = 512
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError with the options to change."""
        if self.num_instances < 1 or self.block_size < 1 or self.max_num_batched_tokens < 1:
            raise ConfigError("--coupled, --block-size and --max-num-batched-tokens must be at least 1")
        if min(self.ttft_slo_s, self.tbt_slo_s) <= 0:
            raise ConfigError("SLOs must be above 0")
