"""Command-line options of a prefill worker, and the limits that follow from them and from the pool plan."""

from dataclasses import dataclass

from moonserve.engine.kv_cache.pool_size import PoolPlan
from moonserve.prefill_worker.decisions.shared_state import Limits
from moonserve.prefill_worker.decisions.write_behind import MIN_HITS_BY_MODE
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, require_at_least_1
from moonserve.transfer import FaultPlan
from moonserve.transfer.config import TransferTimeoutConfig
from moonserve.worker.process import RoleConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(RoleConfig, TransferTimeoutConfig):
    """Options of a prefill worker, in addition to those of every worker."""

    max_model_len: int | None = option(
        None, help="longest prompt in tokens; unset = the most that model and memory allow"
    )
    enable_chunked_prefill: bool = option(
        True, help="divide long prompts over several steps; otherwise a step computes whole prompts"
    )
    scheduling_policy: str = option("fcfs", help="order of waiting requests", choices=("fcfs", "priority"))
    pipeline_parallel_size: int = option(
        1,
        help="stages of a group that prefills every prompt together, each with a share of the layers, with threads and "
        "with KV memory of its own; this worker is the first one and starts the others on this host",
    )
    prepare_ahead: int = option(
        4, help="minimum number of waiting requests that are prepared ahead (reservation, prefix)"
    )
    store_writes: str = option(
        "all",
        help="blocks written to the home store: all, or hot = those re-used in the worker's own memory: fewer "
        "writes and fewer hits (docs/engine-performance.md)",
        choices=tuple(MIN_HITS_BY_MODE),
    )
    max_put_blocks: int = option(64, help="maximum number of blocks being written to the home store")
    max_pending_puts: int = option(4096, help="maximum number of blocks waiting to be written; more are dropped")
    max_prefetch_blocks: int | None = option(
        None,
        help="blocks of waiting requests that stores prefetch from disk; "
        "unset = half of the worker's KV blocks, 0 = none",
    )
    store_reads: str = option(
        "auto",
        help="read a stored prefix instead of computing it: where that is predicted to be faster, always, or never",
        choices=("auto", "always", "never"),
    )
    layered_loads: str = option(
        "auto",
        help="read a stored prefix layer by layer and compute behind it meanwhile: where that is "
        "predicted to be faster, always, or never",
        choices=("auto", "always", "never"),
    )
    landing_ttl_s: float = option(30.0, help="lifetime of a landing lease between renewals, seconds")
    fault_corrupt_writes: int = option(0, help="corrupt this many KV writes, for fault tests")
    fault_drop_connections: int = option(0, help="drop this many transfer connections, for fault tests")

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("max_num_batched_tokens", "prepare_ahead", "max_put_blocks", "max_pending_puts")
        require_at_least_1(self, *counts, "pipeline_parallel_size")
        self._require_group()
        self.transfer_timeout()
        if self.max_prefetch_blocks is not None and self.max_prefetch_blocks < 0:
            raise ConfigError("--max-prefetch-blocks must not be negative")
        if self.landing_ttl_s <= 0:
            raise ConfigError("--landing-ttl-s must be above 0")

    def _require_group(self) -> None:
        """Rejects options that a pipeline group does not support (docs/pipeline.md). A stored block has all layers, but
        each stage has only its own. Raises ConfigError."""
        if self.pipeline_parallel_size == 1:
            return
        if self.home_store is not None:
            raise ConfigError("--home-store cannot be combined with --pipeline-parallel-size above 1")
        if self.can_switch_role:
            raise ConfigError("--role-switching cannot be combined with --pipeline-parallel-size above 1")
        if self.tensor_parallel_size > 1:
            raise ConfigError("--tensor-parallel-size cannot be combined with --pipeline-parallel-size above 1")

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel_size

    def faults(self) -> FaultPlan:
        """Returns the injected transfer faults, for tests."""
        return FaultPlan(
            corrupt_writes=self.fault_corrupt_writes,
            drop_connections=self.fault_drop_connections,
        )

    def limits(self, plan: PoolPlan) -> Limits:
        max_chunk = self.max_num_batched_tokens if self.enable_chunked_prefill else plan.max_model_len
        # Half of the pool: a store serves several workers, and its memory is often not much larger than theirs.
        prefetched = plan.num_blocks // 2 if self.max_prefetch_blocks is None else self.max_prefetch_blocks
        # Only a process that computes alone can wait for a layer of the prefix.
        is_alone = self.pipeline_parallel_size == 1 and self.tensor_parallel_size == 1
        return Limits(
            block_size=self.block_size,
            block_bytes=plan.layout.block_bytes,
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=max_chunk,
            max_num_seqs=self.max_num_seqs,
            prepare_ahead=self.prepare_ahead,
            max_put_blocks=self.max_put_blocks,
            max_pending_puts=self.max_pending_puts,
            max_prefetch_blocks=prefetched,
            num_layers=plan.layout.num_layers,
            store_reads=self.store_reads,
            layered_loads=self.layered_loads if is_alone else "never",
            num_stages=self.pipeline_parallel_size,
            computes_before_grant=self.pipeline_parallel_size == 1,
            policy=self.scheduling_policy,
            store_writes=self.store_writes,
        )
