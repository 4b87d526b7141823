"""Options of `moonserve serve`. An option that a process shares by name is passed on to it (deploy.plan)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from conductor.admission import Admission
from conductor.config import DEFAULT_ROLE_TERMS, DEFAULT_TERMS, ConductorConfig
from conductor.fairness.shares import parse_weights
from conductor.policies import DEFAULT_POLICY as DEFAULT_PLACEMENT
from conductor.policies import POLICY_CHOICES
from conductor.policies.global_cache_aware import DEFAULT_BALANCING_THRESHOLD
from conductor.roles.controller import RoleTerms
from decode_worker.config import AllotmentConfig
from deploy.worker.config import DEFAULT_ROLE_DRAIN_S
from engine.device import DEVICES
from engine.elastic.config import LedgerConfig
from engine.format_config import FormatConfig
from engine.prefix import DEFAULT_EVICTION, EVICTION_NAMES
from engine.replica_config import DEFAULT_KV_BYTES, DEFAULT_UTILIZATION, require_share
from gateway.client_config import ClientConfig
from kvstore.config import StoreConfig
from kvstore.eviction import DEFAULT_POLICY, POLICY_NAMES
from prefill_worker.puts import MIN_HITS
from protocol.config import option, require_at_least_1
from protocol.errors import ConfigError
from protocol.tracing import TracingConfig
from transfer.config import PatienceConfig, TransferConfig

MIB = 2**20

STOP_GRACE_S = 4.0  # serve promises an end within 5 s, and what a disk needs on top
DRAIN_S = 3.0  # leaves a worker time to fail what did not finish, and to say good-bye


@dataclass(frozen=True, kw_only=True)
class ServeConfig(
    FormatConfig,
    TransferConfig,
    PatienceConfig,
    AllotmentConfig,
    LedgerConfig,
    ClientConfig,
    TracingConfig,
):
    """A whole cluster on this machine."""

    model: str | None = option(
        None, help="local Hugging Face folder or hub name; the demo model when not given"
    )
    host: str = option("127.0.0.1", help="address of the HTTP endpoint")
    port: int = option(8000, help="port of the HTTP endpoint")
    served_model_name: tuple[str, ...] = option((), help="names clients may use for the model")
    conductors: int = option(1, help="number of conductors, of which one leads; needs --registry")
    leader_ttl_s: float = option(
        DEFAULT_TERMS.ttl_s,
        help="a conductor that is dead or silent is replaced after this, seconds",
    )
    gateways: int = option(
        1,
        help="number of gateways behind the port; the kernel deals connections out. With a Redis as --registry they "
        "share the limits of keys",
    )
    prefill_workers: int = option(1, help="number of prefill workers")
    pipeline_parallel_size: int = option(
        1,
        help="processes that prefill every prompt together, as one prefill worker, each with a share of the layers",
    )
    tensor_parallel_size: int = option(
        1,
        help="processes that compute every step together, as one worker, each with a share of every layer",
    )
    prefill_tensor_parallel_size: int | None = option(
        None, help="--tensor-parallel-size of prefill workers, where it is another one"
    )
    decode_tensor_parallel_size: int | None = option(
        None, help="--tensor-parallel-size of decode workers, where it is another one"
    )
    store_reads: str = option(
        "auto",
        help="read stored prefixes instead of computing them: where that is predicted to be faster, always, or never",
        choices=("auto", "always", "never"),
    )
    layered_loads: str = option(
        "auto",
        help="compute behind stored prefixes while they are read layer by layer: where that is "
        "predicted to be faster, always, or never",
        choices=("auto", "always", "never"),
    )
    decode_workers: int = option(1, help="number of decode workers")
    store_nodes: int = option(1, help="number of KV store nodes")
    role_switching: str = option(
        "off",
        help="on = workers can change between prefill and decode while they run, and do as load demands",
        choices=("off", "on"),
    )
    conditional_disaggregation: str = option(
        "off",
        help="on = decode workers prefill prompts themselves where the first token comes sooner and both objectives "
        "are kept",
        choices=("off", "on"),
    )
    replication: str = option(
        "on",
        help="on = store nodes copy prefixes from each other whose absence costs requests more time than copying",
        choices=("off", "on"),
    )
    role_hold_s: float = option(
        DEFAULT_ROLE_TERMS.hold_s,
        help="with --role-switching: seconds for which a need must last before a worker changes",
    )
    role_cool_down_s: float = option(
        DEFAULT_ROLE_TERMS.cool_down_s, help="with --role-switching: seconds between two changes"
    )
    role_drain_s: float = option(
        DEFAULT_ROLE_DRAIN_S,
        help="with --role-switching: seconds that what is under way gets to finish before a change",
    )

    max_model_len: int | None = option(
        None, help="longest prompt plus output in tokens; the model's own limit when not given"
    )
    device: str = option(
        "auto",
        help="what workers compute on: auto = cuda where torch sees a GPU and Triton is installed, else cpu; several "
        "GPUs are dealt out in turn; cpu-staged is for tests (docs/cuda.md)",
        choices=DEVICES,
    )
    kv_cache_memory: int | None = option(
        None,
        help="bytes of KV per prefill or decode worker; when not given 256MiB, or on a GPU what "
        "--gpu-memory-utilization leaves",
        unit="bytes",
    )
    gpu_memory_utilization: float = option(
        DEFAULT_UTILIZATION,
        help="share of each GPU's memory that its workers may take together, weights and all",
    )
    dram: int = option(512 * MIB, help="bytes of KV per store node", unit="bytes")
    eviction_policy: str = option(
        DEFAULT_POLICY, help="which KV leaves a store node first", choices=POLICY_NAMES
    )
    ssd: str | None = option(
        None,
        help="folder and bytes of a disk for cold KV of each store node, as /mnt/kv:64GiB; with "
        "several nodes each has a folder of its own below it",
    )
    ssd_key_file: str | None = option(
        None,
        help="file with the key (32 bytes, or 64 hex digits) under which the disk is encrypted",
    )
    ssd_write_through: bool = option(False, help="write all KV to disk soon, not only cold KV")
    ssd_sync_interval_s: float = option(
        1.0,
        help="flush what was written to disk at least so often: a loss of power costs at most the writes of so many"
        " seconds, never a removal; 0 = after every group of writes",
    )
    ssd_flush_s: float = option(
        60.0, help="at a stop, write what is only in memory to disk for at most so many seconds"
    )
    tenant_quota: tuple[str, ...] = option(
        (), help="bytes that tenants may take of each store node, as alice=2GiB,bob=512MiB"
    )
    max_num_seqs: int = option(64, help="sequences in one decode batch")
    max_num_batched_tokens: int = option(512, help="tokens of prompt computed in one step")
    enable_prefix_caching: bool = option(True, help="re-use the KV of equal prefixes")
    prefix_eviction: str = option(
        DEFAULT_EVICTION,
        help="which cached KV makes room in a worker first: least recently (lru) or least frequently used (lfu, counts "
        "age)",
        choices=EVICTION_NAMES,
    )
    store_writes: str = option(
        "all",
        help="what workers put into the store: all blocks, those of answers included, or hot = those of prompts that "
        "were re-used in the worker's own memory",
        choices=tuple(MIN_HITS),
    )
    enable_chunked_prefill: bool = option(True, help="cut long prompts into several steps")
    scheduling_policy: str = option(
        "fcfs", help="order of a prefill worker's queue", choices=("fcfs", "priority")
    )
    num_threads: int | None = option(
        None, help="compute threads per worker; the cores shared out evenly when not given"
    )
    placement_policy: str = option(
        DEFAULT_PLACEMENT, help=f"how the conductor chooses prefill workers: {POLICY_CHOICES}"
    )
    ttft_slo: float = option(30.0, help="seconds to the first token that placement must meet")
    tbt_slo: float = option(1.0, help="seconds between tokens that placement must meet")
    admission: str = option(
        Admission.PREDICTED.value,
        help="which predictions reject requests: none, of the load now, or of the decode load to come",
        choices=tuple(each.value for each in Admission),
    )
    balancing_threshold: float = option(
        DEFAULT_BALANCING_THRESHOLD,
        help="re-use ratio above which a remote prefix is fetched (Algorithm 1)",
    )
    tenant_weights: tuple[str, ...] = option(
        (), help="shares of tenants that compete for prefill, as alice=2,bob=0.5; 1 where not given"
    )

    parent_pid: int | None = option(
        None, help="process without which the cluster must not run: it stops when that one ends"
    )
    log_dir: str | None = option(
        None, help="folder for the processes' logs; below the user's state folder when not given"
    )
    log_format: str = option("human", help="form of log lines", choices=("human", "json"))
    log_level: str = option(
        "info", help="least severe level to log", choices=("debug", "info", "warning", "error")
    )
    fault_corrupt_writes: int = option(
        0, help="testing: flip a byte in this many KV writes of each prefill worker"
    )

    def __post_init__(self) -> None:
        self.transfer_patience()
        self.check_tracing()
        self.transfer_options("127.0.0.1")  # says what is wrong before any process is started
        self.tls()
        self._check_memory()
        require_share(self.gpu_memory_utilization)
        require_at_least_1(
            self,
            "conductors",
            "gateways",
            "prefill_workers",
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "decode_workers",
            "block_size",
            "max_num_batched_tokens",
        )
        if self.role_switching == "on" and self.conditional_disaggregation == "on":
            raise ConfigError(
                "--role-switching and --conditional-disaggregation exclude each other"
            )
        if self.role_switching == "on" and self.pipeline_parallel_size > 1:
            raise ConfigError("--role-switching does not go with --pipeline-parallel-size above 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}: each sequence of a step computes a token"
            )
        self._check_tensor_parallelism()
        self._check_async_scheduling()
        self._check_stores()
        if self.conductors > 1 and self.registry is None:
            raise ConfigError(
                f"--conductors {self.conductors} needs --registry, where they agree which of them leads"
            )
        ConductorConfig(leader_ttl_s=self.leader_ttl_s).terms()
        parse_weights(self.tenant_weights)
        self.check_clients()
        RoleTerms(hold_s=self.role_hold_s, cool_down_s=self.role_cool_down_s)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port} is not between 0 and 65535")

    def _check_async_scheduling(self) -> None:
        if self.async_scheduling and (self.is_elastic or self.conditional_disaggregation == "on"):
            raise ConfigError(
                "--async-scheduling does not go with elastic KV memory or --conditional-disaggregation"
            )

    def _check_tensor_parallelism(self) -> None:
        sizes = self.tensor_parallel_sizes
        if min(sizes) < 1:
            raise ConfigError("a tensor-parallel size is at least 1")
        if self.num_threads is not None and self.num_threads < max(sizes):
            raise ConfigError(
                f"--num-threads {self.num_threads} is below the {max(sizes)} ranks of a worker"
            )
        if sizes[0] > 1 and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "--tensor-parallel-size does not go with --pipeline-parallel-size above 1"
            )
        if self.role_switching == "on" and sizes != (self.tensor_parallel_size,) * 2:
            raise ConfigError(
                "with --role-switching all workers have the same --tensor-parallel-size"
            )

    def _check_memory(self) -> None:
        self.check_budget()
        if self.kv_memory_ledger is not None and self.kv_memory_budget is None:
            raise ConfigError("--kv-memory-ledger needs --kv-memory-budget")
        if self.is_elastic and "rdma" in self.transports:
            raise ConfigError(
                "elastic KV memory does not go with rdma, whose devices pin what is registered: take it out of "
                "--transports"
            )
        if self.is_elastic and self.pipeline_parallel_size > 1:
            raise ConfigError("elastic KV memory does not go with --pipeline-parallel-size above 1")
        budget = self.kv_memory_budget
        if budget is not None and self.memory_floor * self.num_workers > budget:
            raise ConfigError(
                f"--kv-memory-floor {self.memory_floor} for each of {self.num_workers} workers exceeds "
                f"--kv-memory-budget {budget}"
            )

    @property
    def num_workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def memory_floor(self) -> int:
        """Of each worker; a quarter of an equal share where nothing is said: no worker may come to a halt because the
        others are busy."""
        if self.kv_memory_floor is not None or self.kv_memory_budget is None:
            return self.kv_memory_floor or 0
        most = DEFAULT_KV_BYTES if self.kv_cache_memory is None else self.kv_cache_memory
        return min(most, self.kv_memory_budget // (4 * self.num_workers))

    def _check_stores(self) -> None:
        if self.store_nodes < 0:
            raise ConfigError("--store-nodes must not be negative")
        if self.ssd is not None and self.store_nodes == 0:
            raise ConfigError("--ssd needs --store-nodes, whose KV it holds")
        if self.ssd_sync_interval_s < 0:
            raise ConfigError("--ssd-sync-interval-s must not be negative")
        if self.ssd_flush_s < 0:
            raise ConfigError("--ssd-flush-s must not be negative")
        StoreConfig(  # says what is wrong before any process is started
            instance_id="store", dram=self.dram, ssd=self.ssd, tenant_quota=self.tenant_quota
        )

    @property
    def store_stop_grace_s(self) -> float:
        """How long a store node may take to stop."""
        return STOP_GRACE_S + (self.ssd_flush_s if self.ssd is not None else 0.0)

    @property
    def tensor_parallel_sizes(self) -> tuple[int, int]:
        """Of a prefill and of a decode worker."""
        prefill, decode = self.prefill_tensor_parallel_size, self.decode_tensor_parallel_size
        both = self.tensor_parallel_size
        return both if prefill is None else prefill, both if decode is None else decode

    def threads_of(self, tensor_parallel_size: int) -> int:
        """Compute threads of a worker of so many ranks, each of which has one at least."""
        return max(self.threads_per_worker, tensor_parallel_size)

    @property
    def threads_per_worker(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        cores = len(os.sched_getaffinity(0))
        computing = self.prefill_workers * self.pipeline_parallel_size + self.decode_workers
        return max(1, cores // computing)
