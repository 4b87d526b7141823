"""Flags for elastic KV memory, and the `Elasticity` that is created from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.elastic.elasticity import Elasticity, Memory
from engine.elastic.ledger import Ledger
from engine.elastic.pages import Paging
from engine.elastic.seat import Seat
from protocol.config import option
from protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """Options mixed into the configuration of workers. `moonserve serve` passes them on."""

    elastic_kv_memory: bool = option(
        False,
        help="KV takes memory only where blocks live, --kv-cache-memory at most; not beside rdma, which pins it",
    )
    kv_memory_budget: int | None = option(
        None,
        help="bytes of KV of all workers of this host together, each of which has --kv-cache-memory at most; makes "
        "their memory elastic",
        unit="bytes",
    )
    kv_memory_floor: int | None = option(
        None, help="bytes of the budget that each worker can always have", unit="bytes"
    )
    kv_memory_ledger: str | None = option(
        None,
        help="file in which the workers that share --kv-memory-budget keep their shares; clusters of several models on "
        "one host name the same",
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
            raise ConfigError(f"--kv-memory-floor {floor} of a budget of {budget} bytes")

    def check_ledger(self) -> None:
        """Raises ConfigError for an invalid budget, or for a budget without a ledger or the reverse."""
        self.check_budget()
        if (self.kv_memory_budget is None) != (self.kv_memory_ledger is None):
            raise ConfigError("--kv-memory-budget and --kv-memory-ledger go together")

    def elasticity(self, name: str, paging: Paging, memory: Memory) -> Elasticity:
        """Creates the manager of a pool over `memory`, and discards the memory's content. Raises ConfigError."""
        self.check_ledger()
        seat: Seat | None = None
        floor = min(self.kv_memory_floor or 0, paging.range_bytes)
        if self.kv_memory_budget is not None and self.kv_memory_ledger is not None:
            if paging.page_bytes > self.kv_memory_budget:
                raise ConfigError(
                    f"--kv-memory-budget {self.kv_memory_budget} holds no page of {paging.page_bytes} bytes"
                )
            seat = Seat(
                Ledger(Path(self.kv_memory_ledger), budget=self.kv_memory_budget),
                name,
                page_bytes=paging.page_bytes,
                floor=floor,
                ceiling=paging.range_bytes,
            )
        memory.discard(0, paging.range_bytes)  # nothing in it is needed yet
        return Elasticity(paging, memory, seat, floor=floor)
