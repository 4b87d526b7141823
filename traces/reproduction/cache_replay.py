"""A trace through one store, one request after the other: how many of its blocks were there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvstore.eviction import POLICY_NAMES
from protocol.errors import ConfigError
from traces.format import TraceRecord
from traces.simulator.pool import Store
from traces.simulator.results import SimulationResult
from traces.simulator.sampling import key_of

HITS = "hits"  # the counter


@dataclass(frozen=True, kw_only=True)
class CacheReplay:
    """A store of so many blocks under one eviction policy; the result has the counter HITS and nothing else."""

    source: ClassVar[str] = __name__
    policy: str
    num_blocks: int

    @property
    def cost(self) -> float:
        return 0.3  # measured

    def check(self) -> None:
        """Raises ConfigError for a policy that does not exist."""
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"no eviction policy {self.policy!r}")

    def do(self, records: Sequence[TraceRecord]) -> SimulationResult:
        """A request reads its leading blocks that are there and stores the others, its partial last one too."""
        store = Store(self.num_blocks, 0, self.policy)
        hits = 0
        for record in records:
            keys = tuple(map(key_of, record.hash_ids))
            held = store.hold(keys)
            store.put(keys, len(held))
            store.let_go(held)
            hits += len(held)
        return SimulationResult(
            name=self.policy,
            outcomes=(),
            ttft_slo_s=0,
            tbt_slo_s=0,
            duration_s=0,
            counters={HITS: hits},
        )
