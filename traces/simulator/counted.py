"""What a cluster counts beside the requests' own figures, for the result of a run. Reads; changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who counts is named in the types alone
    from traces.simulator.cluster import Cluster


def counted(cluster: Cluster) -> dict[str, float]:
    """By name; those of replicas only where stores copy from each other."""
    stores = [node.store for node in cluster.prefills]
    return {
        "heartbeats": cluster.membership.num_heartbeats,
        "bytes_moved": cluster.network.bytes_carried,
        "blocks_read_locally": cluster.loads.blocks_local,
        "blocks_fetched": cluster.loads.blocks_fetched,
        "evicted_blocks": sum(store.num_evicted for store in stores),
        "refused_blocks": sum(store.num_refused for store in stores),
        "preemptions": sum(node.machine.num_preemptions for node in cluster.decodes),
        "device_s": sum(journey.prefill_s for journey in cluster.journeys),
        **(cluster.replicas.counters if cluster.spec.replication else {}),
    }
