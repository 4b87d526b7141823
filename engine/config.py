"""Flags of a worker's model replica and of its elastic KV memory, with the checks that need no model. No torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from moonserve.engine.cuda.device import CUDA, DEVICES, STAGED
from moonserve.engine.kv_cache.elastic_budget import Ledger
from moonserve.engine.kv_cache.elastic_pages import Paging
from moonserve.engine.kv_cache.elastic_service import ElasticMemory, PageableMemory, SharedPageSupply
from moonserve.engine.kv_cache.eviction import DEFAULT_EVICTION, EVICTION_NAMES
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import KV_DTYPES
from moonserve.protocol.process.config import option, require_at_least_1
from moonserve.protocol.process.lifecycle import ProcessConfig
from moonserve.protocol.process.machine import cache_folder
from moonserve.protocol.process.tracing import TracingConfig

MIB = 2**20
DEFAULT_KV_BYTES = 256 * MIB
DEFAULT_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class ElasticMemoryConfig:
    """Options mixed into the configuration of workers. `moonserve serve` passes them on."""

    elastic_kv_memory: bool = option(
        False,
        help="allocate KV memory only for blocks in use, up to --kv-cache-memory; not possible "
        "with rdma, which pins memory",
    )
    kv_memory_budget: int | None = option(
        None,
        help="bytes of KV that all workers of this host share, each up to --kv-cache-memory; makes "
        "their memory elastic",
        unit="bytes",
    )
    kv_memory_floor: int | None = option(
        None, help="bytes of the budget that are guaranteed to each worker", unit="bytes"
    )
    kv_memory_ledger: str | None = option(
        None,
        help="file with the shares of all workers under --kv-memory-budget; clusters on one host must "
        "name the same file",
    )

    @property
    def is_elastic(self) -> bool:
        return self.elastic_kv_memory or self.kv_memory_budget is not None

    def check_budget(self) -> None:
        """Raises ConfigError for a floor without a budget or above it."""
        budget, floor = self.kv_memory_budget, self.kv_memory_floor
        if floor is not None and budget is None:
            raise ConfigError("--kv-memory-floor needs --kv-memory-budget, of which it is a part")
        if budget is not None and not 0 <= (floor or 0) <= budget:
            raise ConfigError(f"--kv-memory-floor must be from 0 to --kv-memory-budget {budget}, not {floor}")

    def check_ledger(self) -> None:
        """Raises ConfigError for an invalid budget, or for a budget without a ledger or the reverse."""
        self.check_budget()
        if (self.kv_memory_budget is None) != (self.kv_memory_ledger is None):
            raise ConfigError("--kv-memory-budget and --kv-memory-ledger must be given together")

    def make_elastic_memory(self, name: str, paging: Paging, memory: PageableMemory) -> ElasticMemory:
        """Creates the manager of a pool over `memory`, and discards the memory's content. Raises ConfigError."""
        self.check_ledger()
        supply: SharedPageSupply | None = None
        floor = min(self.kv_memory_floor or 0, paging.range_bytes)
        if self.kv_memory_budget is not None and self.kv_memory_ledger is not None:
            if paging.page_bytes > self.kv_memory_budget:
                raise ConfigError(
                    f"--kv-memory-budget {self.kv_memory_budget} is less than one page of {paging.page_bytes} bytes"
                )
            supply = SharedPageSupply(
                Ledger(Path(self.kv_memory_ledger), budget=self.kv_memory_budget),
                name,
                page_bytes=paging.page_bytes,
                floor=floor,
                ceiling=paging.range_bytes,
            )
        memory.discard(0, paging.range_bytes)  # nothing in it is needed yet
        return ElasticMemory(paging, memory, supply, floor=floor)


@dataclass(frozen=True, kw_only=True)
class FormatConfig:
    """Formats of weights and KV, and the kernels that compute on them. Flags that vLLM also has mean the same."""

    dtype: str = option(
        "auto",
        help="data type of weights and, unless quantised, of KV",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        help="data type of KV: auto = as --dtype; fp8 (E4M3) and int8 quantise it with a scale per token and head, "
        "with some loss (docs/kv-dtypes.md)",
        choices=("auto", *KV_DTYPES),
    )
    quantize: str = option(
        "auto",
        help="format of weights: auto = as in the checkpoint; int8 and int4 round matrices to integers while loading; "
        "on CPUs only (docs/models.md)",
        choices=("auto", "int8", "int4"),
    )
    load_format: str = option("auto", help="dummy = random weights, for measuring", choices=("auto", "dummy"))
    block_size: int = option(32, help="tokens per KV block")
    kernels: str = option(
        "auto",
        help="implementation of layers and attention: auto = native, compiled at the first start, or Triton on a GPU; "
        "for other than the own families transformers, which is slower",
        choices=("auto", "native", "torch", "transformers"),
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(ProcessConfig, FormatConfig, ElasticMemoryConfig, TracingConfig):
    """Options of every worker. Flags that vLLM also has mean the same."""

    model: str = option(help="local model folder, .gguf file or hub name")
    max_model_len: int | None = option(
        None,
        help="longest prompt plus output in tokens; default: what model and memory allow",
    )
    device: str = option(
        "auto",
        help="where to compute: auto = cuda where torch sees a GPU and Triton is installed, else cpu; cpu-staged is "
        "for tests (docs/cuda.md)",
        choices=DEVICES,
    )
    kv_cache_memory: int | None = option(
        None,
        help="bytes of KV; default: 256MiB, or on a GPU what --gpu-memory-utilization leaves",
        unit="bytes",
    )
    gpu_memory_utilization: float = option(
        DEFAULT_UTILIZATION,
        help="share of the GPU's memory that this worker may use, weights included",
    )
    max_num_seqs: int = option(64, help="most sequences in one step")
    max_num_batched_tokens: int = option(512, help="most tokens computed in one step")
    enable_prefix_caching: bool = option(True, help="share the KV of equal prefixes")
    prefix_eviction: str = option(
        DEFAULT_EVICTION,
        help="cached KV that is evicted first: least recently used (lru), or least frequently used with aging (lfu)",
        choices=EVICTION_NAMES,
    )
    reserved_kv_share: float = option(
        0.0,
        help="share of the KV that is reserved for new requests with a priority below 0",
    )
    zero_kv_blocks: bool = option(False, help="clear the memory of KV blocks before another request gets them")
    num_threads: int = option(1, help="compute threads")
    shared_cores: str | None = option(
        None,
        help="PATH:ROW of the table in which the workers of a host show when they compute, so that others use their "
        "cores meanwhile; moonserve serve gives it",
    )
    tensor_parallel_size: int = option(
        1,
        help="ranks that compute every step together: processes of this host, each with a share of the heads, the MLP "
        "and --num-threads, over one KV memory",
    )
    cache_dir: str | None = option(
        None,
        help="folder for compiled kernels and measured speeds; default: ~/.cache/moonserve",
    )
    drain_timeout_s: float = option(5.0, help="seconds that requests may take to finish when the worker stops")
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")

    def __post_init__(self) -> None:
        require_at_least_1(self, "block_size", "max_num_seqs", "num_threads", "tensor_parallel_size")
        self._require_threads()
        self.check_ledger()
        require_share(self.gpu_memory_utilization)
        if not 0.0 <= self.reserved_kv_share < 1.0:
            raise ConfigError(f"--reserved-kv-share must be from 0 to below 1, not {self.reserved_kv_share}")
        if self.zero_kv_blocks and self.num_stages > 1:
            raise ConfigError("--zero-kv-blocks does not go with --pipeline-parallel-size above 1")
        if self.device in (CUDA, STAGED):
            self.require_device(self.device)

    def require_device(self, device: str) -> None:
        """Raises ConfigError for options that are not supported on a device with its own memory."""
        wrong = [
            flag
            for flag, is_given in (
                ("--tensor-parallel-size above 1", self.tensor_parallel_size > 1),
                ("--pipeline-parallel-size above 1", self.num_stages > 1),
                ("elastic KV memory", self.is_elastic),
                ("--zero-kv-blocks", self.zero_kv_blocks),
                (
                    f"--kv-cache-dtype {self.kv_cache_dtype}",
                    device == CUDA and self.kv_cache_dtype in ("fp8", "int8"),
                ),
                (f"--kernels {self.kernels}", device == CUDA and self.kernels != "auto"),
                (f"--quantize {self.quantize}", device == CUDA and self.quantize != "auto"),
            )
            if is_given
        ]
        if wrong:
            raise ConfigError(f"{' and '.join(wrong)} can be used with --device cpu only, not {device}")

    def _require_threads(self) -> None:
        if self.num_threads < self.tensor_parallel_size:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} needs as many --num-threads, not "
                f"{self.num_threads}: each rank computes in threads of its own"
            )

    @property
    def threads_per_rank(self) -> int:
        return self.num_threads // self.tensor_parallel_size

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline that the replica is part of."""
        return 1

    @property
    def can_switch_role(self) -> bool:
        """True if the worker serves `RoleSwitch`."""
        return False


def require_share(utilization: float) -> None:
    """Raises ConfigError unless `utilization` is above 0 and at most 1."""
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(f"--gpu-memory-utilization must be above 0 and at most 1, not {utilization}")


def cache_folder_of(config: ReplicaConfig) -> Path:
    """Returns the folder for compiled kernels and measured speeds."""
    return Path(config.cache_dir) if config.cache_dir else cache_folder(os.environ, Path.home())
