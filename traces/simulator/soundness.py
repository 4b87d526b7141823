"""Whether every piece of a simulated cluster is sound. Knows its pieces, and nothing of how they are connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traces.simulator.cluster import Cluster


def validate_pieces(cluster: Cluster) -> None:
    """Raises AssertionError for one that is not."""
    cluster.network.validate()
    cluster.loads.validate()
    cluster.handoffs.validate()
    cluster.replicas.validate()
    cluster.conductor.validate()
    for prefill in cluster.prefills:
        prefill.machine.validate()
        held = cluster.loads.held_at(prefill) + cluster.replicas.held_at(prefill)
        prefill.store.validate(held)
    for decode in cluster.decodes:
        decode.machine.validate()
