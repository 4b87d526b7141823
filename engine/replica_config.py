"""Options of a worker's model replica, and the checks on them that do not depend on the machine. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.device import CUDA, DEVICES, STAGED
from engine.elastic.config import LedgerConfig
from engine.prefix import DEFAULT_EVICTION, EVICTION_NAMES
from protocol.config import option, require_at_least_1
from protocol.errors import ConfigError
from protocol.layout import KV_DTYPES
from protocol.machine import cache_folder
from protocol.process import ProcessConfig
from protocol.tracing import TracingConfig

MIB = 2**20
DEFAULT_KV_BYTES = 256 * MIB
DEFAULT_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class FormatConfig:
    """Formats of weights and KV, and the kernels that compute on them. Flags that vLLM also has mean the same."""

    dtype: str = option(
        "auto",
        help="of weights and, unless it is quantised, of KV",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        help="of KV: auto = as --dtype; fp8 (E4M3) and int8 quantise it, a scale per token and head, with some loss "
        "(docs/kv-dtypes.md)",
        choices=("auto", *KV_DTYPES),
    )
    load_format: str = option("auto", help="dummy = random weights, for measuring", choices=("auto", "dummy"))
    block_size: int = option(32, help="tokens per KV block")
    kernels: str = option(
        "auto",
        help="what computes layers and attention: auto = native, compiled at the first start; on a GPU Triton's",
        choices=("auto", "native", "torch"),
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(ProcessConfig, FormatConfig, LedgerConfig, TracingConfig):
    """Options of every worker. Flags that vLLM also has mean the same."""

    model: str = option(help="local Hugging Face folder or hub name")
    max_model_len: int | None = option(
        None,
        help="longest prompt plus output in tokens; what model and memory allow when not given",
    )
    device: str = option(
        "auto",
        help="what computes: auto = cuda where torch sees a GPU and Triton is installed, else cpu; cpu-staged is for "
        "tests (docs/cuda.md)",
        choices=DEVICES,
    )
    kv_cache_memory: int | None = option(
        None,
        help="bytes of KV; when not given 256MiB, or on a GPU what --gpu-memory-utilization leaves",
        unit="bytes",
    )
    gpu_memory_utilization: float = option(
        DEFAULT_UTILIZATION,
        help="share of the GPU's memory that this worker may take, weights and all",
    )
    max_num_seqs: int = option(64, help="sequences in one step")
    max_num_batched_tokens: int = option(512, help="tokens computed in one step")
    enable_prefix_caching: bool = option(True, help="share the KV of equal prefixes")
    prefix_eviction: str = option(
        DEFAULT_EVICTION,
        help="which cached KV makes room first: least recently (lru) or least frequently used (lfu, counts age)",
        choices=EVICTION_NAMES,
    )
    reserved_kv_share: float = option(
        0.0,
        help="share of the KV that is kept free of new requests of priority 0 and above, for those below 0",
    )
    zero_kv_blocks: bool = option(False, help="clear the memory of KV blocks before another request gets them")
    num_threads: int = option(1, help="compute threads")
    tensor_parallel_size: int = option(
        1,
        help="ranks that compute every step together: processes of this host, each with a share of the heads, the MLP "
        "and --num-threads, over one KV memory",
    )
    cache_dir: str | None = option(
        None,
        help="folder that keeps compiled kernels and measured speeds; ~/.cache/moonserve when not given",
    )
    drain_timeout_s: float = option(5.0, help="seconds that requests may take to finish when the worker stops")
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")

    def __post_init__(self) -> None:
        require_at_least_1(self, "block_size", "max_num_seqs", "num_threads", "tensor_parallel_size")
        self._require_threads()
        self.check_ledger()
        require_share(self.gpu_memory_utilization)
        if not 0.0 <= self.reserved_kv_share < 1.0:
            raise ConfigError(f"--reserved-kv-share is a share from 0 to below 1, not {self.reserved_kv_share}")
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
            )
            if is_given
        ]
        if wrong:
            raise ConfigError(f"{' and '.join(wrong)} go with --device cpu only, not {device}")

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
        raise ConfigError(f"--gpu-memory-utilization is a share above 0 and up to 1, not {utilization}")


def cache_folder_of(config: ReplicaConfig) -> Path:
    """Returns the folder for compiled kernels and measured speeds."""
    return Path(config.cache_dir) if config.cache_dir else cache_folder(os.environ, Path.home())
