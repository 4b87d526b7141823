"""What the catalog asks of an eviction policy.

The catalog offers a key once it may be evicted (nobody reads it, and no block that follows it in its chain is
resident) and withdraws it when that ceases to be so. A policy therefore only orders what is offered, whatever the
reason. It knows keys, their use and what they follow; neither sizes nor leases.
"""

from __future__ import annotations

from typing import Protocol

from protocol.keys import BlockKey


class EvictionPolicy(Protocol):
    """The order of eviction among the keys on offer. Every call costs O(log n) amortized, n = resident keys."""

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        """`key` is new in the store, which is its first use. `parent` precedes it and need not be resident."""

    def used(self, key: BlockKey) -> None:
        """`key`, which was added, was read or asked for again."""

    def offer(self, key: BlockKey) -> None:
        """`key` may be evicted from now on; no-op when it is on offer."""

    def withdraw(self, key: BlockKey) -> None:
        """`key` may not be evicted for now; no-op when it is not on offer."""

    def forget(self, key: BlockKey) -> None:
        """`key` left the store; no-op when it was not there."""

    def victim(self) -> BlockKey | None:
        """The key on offer to evict first; it stays on offer until forgotten. None = nothing is on offer."""
