"""Command-line options of a decode worker, and the limits that follow from them and from the pool plan."""

import logging
import sys
from dataclasses import dataclass

from moonserve.decode_worker.decisions.limits_and_counters import Limits
from moonserve.decode_worker.decisions.speculation import Speculation
from moonserve.engine.admission_policy import AdmissionPolicy, OnDemandPolicy
from moonserve.engine.cuda.device import CUDA
from moonserve.engine.kv_cache.pool_size import PoolPlan
from moonserve.engine.lookahead_policy import LookaheadPolicy, PreemptionCosts
from moonserve.engine.replica import Replica
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, require_at_least_1
from moonserve.protocol.step_time import StepBudget
from moonserve.worker.process import RoleConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AllotmentConfig:
    """Options of block allocation and scheduling. A mixin for processes that become or start decode workers."""

    block_allocation: str = option(
        "lookahead",
        help="which sequences a decode worker admits to its KV: lookahead = by their predicted need, "
        "learned from sequences that ended; on-demand = while there is a free block for each",
        choices=("lookahead", "on-demand"),
    )

    async_scheduling: bool | None = option(
        None,
        help="prepare a decode step while the previous one runs; unset = on GPUs only, since a CPU that "
        "prepares computes nothing meanwhile (docs/cuda.md)",
    )

    speculative: str = option(
        "off",
        help="decode workers guess further tokens from repetitions in a sequence and verify them in the same step; "
        "output stays the same: on = always, adaptive = where it pays (docs/engine-performance.md)",
        choices=("off", "on", "adaptive"),
    )
    num_speculative_tokens: int = option(8, help="most tokens that a sequence guesses in one step")
    prompt_lookup_max: int = option(4, help="longest end of a sequence, in tokens, that is looked up for a guess")
    prompt_lookup_min: int = option(2, help="shortest end of a sequence, in tokens, that is looked up for a guess")

    def speculation(self, replica: Replica) -> Speculation | None:
        """Returns the settings of speculative decoding on this replica; None if it is off. Logs what limits it."""
        if self.speculative == "off":
            return None
        max_rows = replica.thread.engine.exact_rows
        if self.runs_ahead(replica.device) or not max_rows:
            log.warning(
                "speculative decoding is off: it needs native kernels, with which a token does not depend on the rest "
                "of its step, and no --async-scheduling"
            )
            return None
        if max_rows < sys.maxsize:
            log.info("drafts are limited to decode steps of %d rows, above which other kernels compute", max_rows)
        return Speculation(
            num_tokens=self.num_speculative_tokens,
            lookup_max=self.prompt_lookup_max,
            lookup_min=self.prompt_lookup_min,
            max_rows=max_rows,
            costs=replica.step_costs[1] if self.speculative == "adaptive" else None,
        )

    def check_speculation(self) -> None:
        """Raises ConfigError for lengths that are not possible."""
        require_at_least_1(self, "num_speculative_tokens", "prompt_lookup_min")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"--prompt-lookup-min {self.prompt_lookup_min} is above --prompt-lookup-max {self.prompt_lookup_max}"
            )

    def runs_ahead(self, device: str) -> bool:
        """Returns True if a decode worker on this device prepares a step while the one before it runs."""
        return device == CUDA if self.async_scheduling is None else self.async_scheduling

    def policy(self, replica: Replica) -> AdmissionPolicy:
        """Returns the admission policy of a worker over this replica."""
        if self.block_allocation == "on-demand":
            return OnDemandPolicy()
        prefill, decode = replica.step_costs
        costs = PreemptionCosts(decode=decode, prefill=prefill)
        # A worker that has not learned anything yet must not assume that every answer is as long as it may become.
        return LookaheadPolicy(costs=costs, until_known=OnDemandPolicy())


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(RoleConfig, AllotmentConfig):
    """Configuration of a decode worker."""

    store_writes: str = option(
        "all",
        help="blocks written to the home store: all = answers, too, so that a conversation's next turn finds "
        "them; hot = only those of preempted sequences",
        choices=("all", "hot"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}: each sequence of a step computes a token"
            )
        self.check_speculation()
        if self.async_scheduling and self.is_elastic:
            raise ConfigError(
                "--async-scheduling cannot be combined with elastic KV memory, which moves blocks between two steps"
            )

    def limits(
        self,
        plan: PoolPlan,
        budget: StepBudget | None = None,
        *,
        runs_ahead: bool = False,
        speculation: Speculation | None = None,
    ) -> Limits:
        """Returns the scheduling limits. `budget` bounds the time of steps that contain chunks of prompts."""
        return Limits(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            budget=budget,
            runs_ahead=runs_ahead,
            speculation=speculation,
        )
