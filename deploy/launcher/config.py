"""Options of `moonserve serve`. An option is passed on to each process that has one of that name
(`deploy.launcher.process_specs`)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.placement.tenant_fairness import parse_weights
from moonserve.conductor.role_switching import RoleThresholds
from moonserve.decode_worker.config import AllotmentConfig, DecodeConfig
from moonserve.decode_worker.role_switching import RoleSwitchingConfig
from moonserve.engine.config import (
    DEFAULT_KV_BYTES,
    DEFAULT_UTILIZATION,
    ElasticMemoryConfig,
    FormatConfig,
    require_share,
)
from moonserve.engine.cuda.device import DEVICES
from moonserve.gateway.config import ClientConfig
from moonserve.kvstore.config import StoreConfig
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, options_of, require_at_least_1
from moonserve.protocol.process.tracing import TracingConfig
from moonserve.transfer.config import TransferConfig, TransferTimeoutConfig
from moonserve.vllm.serving.config import VllmConfig

STOP_GRACE_S = 4.0  # from SIGTERM to SIGKILL; serve promises to end within 5 s, plus the flush of a disk
# Workers compute on all cores. Processes that answer clients need little CPU time, but need it without delay.
WORKER_NICE = 10
DRAIN_S = 3.0  # for requests to finish; the rest of STOP_GRACE_S is for failing the others and deregistering


def _option_of(cls: type, name: str, *, help: str | None = None) -> Any:
    """Returns the option as a process's own configuration declares it. `help`: replaces a text about one process."""
    [declared] = [each for each in fields(cls) if each.name == name]
    metadata = declared.metadata if help is None else {**declared.metadata, "help": help}
    return field(default=declared.default, metadata=metadata)


_OWN_ENGINE = {o.name for cls in (PrefillConfig, RoleSwitchingConfig) for o in options_of(cls)} | {
    *("pipeline_parallel_size", "tensor_parallel_size", "prefill_tensor_parallel_size", "decode_tensor_parallel_size"),
    *("role_switching", "conditional_disaggregation", "lend_cores"),
}
_OWN_ENGINE -= {o.name for cls in (VllmConfig, StoreConfig, ConductorConfig, TransferConfig) for o in options_of(cls)}
_OWN_ENGINE -= {"device", "gpu_memory_utilization", "num_threads"}
"""Options of `ServeConfig` that only workers of the own engine have."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(
    FormatConfig,
    TransferConfig,
    TransferTimeoutConfig,
    AllotmentConfig,
    ElasticMemoryConfig,
    ClientConfig,
    TracingConfig,
):
    """Options of a whole cluster on this machine."""

    model: str | None = option(None, help="local model folder, .gguf file or hub name; the demo model when not given")
    engine: str = option(
        "moonserve",
        help="what workers compute with: the own engine, or vLLM in an environment that has it (docs/vllm.md)",
        choices=("moonserve", "vllm"),
    )
    vllm: tuple[str, ...] = _option_of(VllmConfig, "vllm")
    vllm_python: str | None = option(
        None, help="Python interpreter of an environment with vLLM, for --engine vllm; default: the running one"
    )
    kv_connector: bool = _option_of(VllmConfig, "kv_connector")
    seeded_draws: str = _option_of(VllmConfig, "seeded_draws")
    host: str = option("127.0.0.1", help="address of the HTTP endpoint")
    port: int = option(8000, help="port of the HTTP endpoint")
    served_model_name: tuple[str, ...] = option((), help="names clients may use for the model")
    conductors: int = option(1, help="number of conductors, of which one leads; needs --registry")
    active_conductors: int = option(
        1,
        help="number of active conductors, each of which places requests on its own share of the instances; more than "
        "1 takes the place of --conductors and needs no registry",
    )
    leader_ttl_s: float = _option_of(ConductorConfig, "leader_ttl_s")
    gateways: int = option(
        1,
        help="number of gateways behind the port; the kernel distributes connections. With a Redis as --registry they "
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
        None, help="--tensor-parallel-size of prefill workers, if another"
    )
    decode_tensor_parallel_size: int | None = option(None, help="--tensor-parallel-size of decode workers, if another")
    store_reads: str = _option_of(PrefillConfig, "store_reads")
    layered_loads: str = _option_of(PrefillConfig, "layered_loads")
    decode_workers: int = option(1, help="number of decode workers")
    store_nodes: int = option(1, help="number of KV store nodes")
    worker_nice: int = option(
        WORKER_NICE,
        help="priority of workers that are ready, as nice(1) counts it: 19 leaves most of the processor to the "
        "gateway and the conductor, 0 shares it equally",
    )
    role_switching: str = option(
        "off",
        help="on = workers can change between prefill and decode while they run, and do as load demands",
        choices=("off", "on"),
    )
    conditional_disaggregation: str = _option_of(ConductorConfig, "conditional_disaggregation")
    role_hold_s: float = _option_of(ConductorConfig, "role_hold_s")
    role_cool_down_s: float = _option_of(ConductorConfig, "role_cool_down_s")
    role_drain_s: float = _option_of(RoleSwitchingConfig, "role_drain_s")

    max_model_len: int | None = option(
        None, help="longest prompt plus output in tokens; the model's own limit when not given"
    )
    device: str = option(
        "auto",
        help="what workers compute on: auto = cuda where torch sees a GPU and Triton is installed, else cpu; several "
        "GPUs are assigned in turn; cpu-staged is for tests (docs/cuda.md)",
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
        help="share of each GPU's memory that its workers may take together, including weights",
    )
    dram: int = _option_of(StoreConfig, "dram", help="bytes of KV per store node")
    eviction_policy: str = _option_of(StoreConfig, "eviction_policy", help="which KV leaves a store node first")
    ssd: str | None = option(
        None,
        help="folder and bytes of a disk for cold KV of each store node, as /mnt/kv:64GiB; with "
        "several nodes each has a folder of its own below it",
    )
    ssd_key_file: str | None = _option_of(StoreConfig, "ssd_key_file")
    ssd_write_through: bool = _option_of(StoreConfig, "ssd_write_through")
    ssd_sync_interval_s: float = _option_of(StoreConfig, "ssd_sync_interval_s")
    ssd_flush_s: float = _option_of(StoreConfig, "ssd_flush_s")
    tenant_quota: tuple[str, ...] = _option_of(
        StoreConfig,
        "tenant_quota",
        help="bytes that tenants may take of each store node, as alice=2GiB,bob=512MiB",
    )
    max_num_seqs: int = _option_of(DecodeConfig, "max_num_seqs", help="sequences in one decode batch")
    max_num_batched_tokens: int = _option_of(PrefillConfig, "max_num_batched_tokens")
    enable_prefix_caching: bool = _option_of(PrefillConfig, "enable_prefix_caching")
    prefix_eviction: str = _option_of(PrefillConfig, "prefix_eviction")
    reserved_kv_share: float = _option_of(PrefillConfig, "reserved_kv_share")
    zero_kv_blocks: bool = _option_of(PrefillConfig, "zero_kv_blocks")
    store_writes: str = _option_of(PrefillConfig, "store_writes")
    enable_chunked_prefill: bool = _option_of(PrefillConfig, "enable_chunked_prefill")
    scheduling_policy: str = _option_of(PrefillConfig, "scheduling_policy", help="order of a prefill worker's queue")
    num_threads: int | None = option(
        None, help="compute threads per worker; the cores shared out evenly when not given"
    )
    lend_cores: str = option(
        "on",
        help="workers of the own engine compute on each other's cores while these are idle, unless --num-threads is "
        "given",
        choices=("on", "off"),
    )
    placement_policy: str = _option_of(ConductorConfig, "placement_policy")
    ttft_slo: float = _option_of(ConductorConfig, "ttft_slo")
    tbt_slo: float = _option_of(ConductorConfig, "tbt_slo")
    admission: str = _option_of(ConductorConfig, "admission")
    balancing_threshold: float = _option_of(ConductorConfig, "balancing_threshold")
    tenant_weights: tuple[str, ...] = _option_of(ConductorConfig, "tenant_weights")

    parent_pid: int | None = option(None, help="process with which the cluster ends")
    log_dir: str | None = option(
        None, help="folder for the processes' logs; below the user's state folder when not given"
    )
    log_format: str = _option_of(PrefillConfig, "log_format")
    log_level: str = _option_of(PrefillConfig, "log_level")
    fault_corrupt_writes: int = _option_of(PrefillConfig, "fault_corrupt_writes")

    def __post_init__(self) -> None:
        """Checks the options before any process starts. Raises ConfigError."""
        self.transfer_timeout()
        self.check_tracing()
        self.transfer_options("127.0.0.1")
        self.tls()
        self.check_budget()
        self.check_speculation()
        self.check_clients()
        require_share(self.gpu_memory_utilization)
        require_at_least_1(
            self,
            *(
                "conductors",
                "active_conductors",
                "gateways",
                "prefill_workers",
                "pipeline_parallel_size",
                "tensor_parallel_size",
            ),
            *("decode_workers", "block_size", "max_num_batched_tokens"),
        )
        ConductorConfig(leader_ttl_s=self.leader_ttl_s).claim_terms()
        parse_weights(self.tenant_weights)
        RoleThresholds(hold_s=self.role_hold_s, cool_down_s=self.role_cool_down_s)
        if self.ssd_sync_interval_s < 0 or self.ssd_flush_s < 0:
            raise ConfigError("--ssd-sync-interval-s and --ssd-flush-s must not be negative")
        StoreConfig(instance_id="store", dram=self.dram, ssd=self.ssd, tenant_quota=self.tenant_quota)
        for is_wrong, message in (*self._out_of_range(), *self._excluded()):
            if is_wrong:
                raise ConfigError(message)

    def _out_of_range(self) -> Iterator[tuple[bool, str]]:
        sizes = self.tensor_parallel_sizes
        yield not 0 <= self.port < 65536, f"--port {self.port} is not between 0 and 65535"
        nice = self.worker_nice
        yield not 0 <= nice <= 19, f"--worker-nice {nice} is not between 0 and 19"
        yield self.store_nodes < 0, "--store-nodes must not be negative"
        yield min(sizes) < 1, "a tensor-parallel size is at least 1"
        yield (
            self.max_num_batched_tokens < self.max_num_seqs,
            f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
            f"--max-num-seqs {self.max_num_seqs}: each sequence of a step computes a token",
        )
        yield (
            self.num_threads is not None and self.num_threads < max(sizes),
            f"--num-threads {self.num_threads} is below the {max(sizes)} ranks of a worker",
        )
        budget = self.kv_memory_budget
        yield (
            budget is not None and self.memory_floor * self.num_workers > budget,
            f"--kv-memory-floor {self.memory_floor} for each of {self.num_workers} workers exceeds "
            f"--kv-memory-budget {budget}",
        )

    def _excluded(self) -> Iterator[tuple[bool, str]]:
        """Yields violations among options that require or exclude each other."""
        switches, is_group = self.role_switching == "on", self.pipeline_parallel_size > 1
        conditional, sizes = self.conditional_disaggregation == "on", self.tensor_parallel_sizes
        pipeline = "does not go with --pipeline-parallel-size above 1"
        yield (
            switches and conditional,
            "--role-switching and --conditional-disaggregation exclude each other",
        )
        yield switches and is_group, f"--role-switching {pipeline}"
        yield sizes[0] > 1 and is_group, f"--tensor-parallel-size {pipeline}"
        yield self.is_elastic and is_group, f"elastic KV memory {pipeline}"
        yield (
            switches and sizes != (self.tensor_parallel_size,) * 2,
            "with --role-switching all workers have the same --tensor-parallel-size",
        )
        yield (
            bool(self.async_scheduling) and (self.is_elastic or conditional),
            "--async-scheduling does not go with elastic KV memory or --conditional-disaggregation",
        )
        yield (
            self.is_elastic and "rdma" in self.transports,
            "elastic KV memory does not go with rdma, whose devices pin what is registered: take it out of "
            "--transports",
        )
        yield (
            self.kv_memory_ledger is not None and self.kv_memory_budget is None,
            "--kv-memory-ledger needs --kv-memory-budget",
        )
        yield (
            self.ssd is not None and self.store_nodes == 0,
            "--ssd needs --store-nodes: it holds the KV of store nodes",
        )
        yield (
            self.engine == "vllm" and self.kv_connector and self.tls_certificate is not None,
            "the KV connector of --engine vllm is not encrypted: give --no-kv-connector with --tls-certificate",
        )
        yield bool(self.vllm) and self.engine != "vllm", "--vllm.NAME needs --engine vllm"
        if self.engine == "vllm":
            given = sorted(_OWN_ENGINE & {o.name for o in options_of(type(self)) if getattr(self, o.name) != o.default})
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            yield bool(given), f"{flags}: options of the own engine; those of vLLM are given as --vllm.NAME"
        yield (
            self.conductors > 1 and self.active_conductors > 1,
            "--conductors are standbys of one that leads: give either --conductors or --active-conductors",
        )
        yield (
            self.conductors > 1 and self.registry is None,
            f"--conductors {self.conductors} needs --registry, where they elect their leader",
        )

    @property
    def num_conductors(self) -> int:
        return max(self.conductors, self.active_conductors)

    @property
    def num_workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def memory_floor(self) -> int:
        """Least KV memory of each worker in bytes. With a budget, the default is a quarter of an equal share, at most
        the pool's size: no worker may stall because the others are busy."""
        if self.kv_memory_floor is not None or self.kv_memory_budget is None:
            return self.kv_memory_floor or 0
        most = DEFAULT_KV_BYTES if self.kv_cache_memory is None else self.kv_cache_memory
        return min(most, self.kv_memory_budget // (4 * self.num_workers))

    @property
    def tensor_parallel_sizes(self) -> tuple[int, int]:
        """Tensor-parallel sizes of a prefill worker and of a decode worker."""
        prefill, decode = self.prefill_tensor_parallel_size, self.decode_tensor_parallel_size
        both = self.tensor_parallel_size
        return both if prefill is None else prefill, both if decode is None else decode

    @property
    def lends_cores(self) -> bool:
        """True if workers may compute on each other's cores, which they cannot with ranks and stages."""
        is_simple = self.pipeline_parallel_size == 1 and self.tensor_parallel_sizes == (1, 1)
        return self.lend_cores == "on" and self.num_threads is None and is_simple

    @property
    def threads_per_worker(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        cores = len(os.sched_getaffinity(0))
        computing = self.prefill_workers * self.pipeline_parallel_size + self.decode_workers
        return max(1, cores // computing)
