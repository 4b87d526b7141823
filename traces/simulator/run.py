"""Simulating a trace: builds the requests, runs the clock, sums up."""

from __future__ import annotations

import time
from collections.abc import Sequence

from protocol.errors import ConfigError
from traces.format import TraceRecord
from traces.simulator.clock import Clock
from traces.simulator.cluster import Cluster
from traces.simulator.events import Event
from traces.simulator.journey import Journey
from traces.simulator.results import SimulationResult
from traces.simulator.sampling import key_of
from traces.simulator.spec import ClusterSpec


def simulate(
    spec: ClusterSpec, records: Sequence[TraceRecord], *, name: str = ""
) -> SimulationResult:
    """What a cluster makes of a trace. Equal arguments give equal results, but for `wall_s`.

    Raises ConfigError for a spec or a trace that cannot be simulated.
    """
    began = time.perf_counter()
    cluster = Cluster(spec, journeys_of(records, spec.block_size, spec.model.max_model_len))
    clock: Clock[Event] = Clock()
    clock.run(cluster.begin(), cluster.handle)
    result = result_of(cluster, name or spec.policy, clock.num_events)
    return _timed(result, time.perf_counter() - began)


def journeys_of(
    records: Sequence[TraceRecord], block_size: int, max_model_len: int
) -> list[Journey]:
    """One per request. Raises ConfigError when the trace's ids do not stand for blocks of this size."""
    if any(record.tokens_per_hash != block_size for record in records):
        raise ConfigError(
            f"the trace's hash ids stand for {records[0].tokens_per_hash} tokens and blocks have"
            f" {block_size}: make --block-size equal"
        )
    journeys = []
    for index, record in enumerate(records):
        room = max_model_len - record.input_length
        num_full = record.input_length // block_size
        journeys.append(
            Journey(
                index=index,
                record=record,
                num_outputs=max(min(record.output_length, room), 1),
                keys=tuple(key_of(hash_id) for hash_id in record.hash_ids[:num_full]),
            )
        )
    return journeys


def result_of(cluster: Cluster, name: str, num_events: int) -> SimulationResult:
    journeys, spec = cluster.journeys, cluster.spec
    began_at = min((journey.record.arrived_s for journey in journeys), default=0.0)
    ended_at = max((journey.ended_at for journey in journeys), default=0.0)
    network, loads = cluster.network, cluster.loads
    return SimulationResult(
        name=name,
        outcomes=[journey.outcome(began_at) for journey in journeys],
        ttft_slo_s=spec.ttft_slo_s,
        tbt_slo_s=spec.tbt_slo_s,
        duration_s=ended_at - began_at,
        instances=cluster.samples.instances,
        replicas=cluster.samples.replicas,
        counters={
            "events": num_events,
            "heartbeats": cluster.membership.num_heartbeats,
            "bytes_moved": network.bytes_carried,
            "blocks_read_locally": loads.blocks_local,
            "blocks_fetched": loads.blocks_fetched,
            "evicted_blocks": sum(node.store.num_evicted for node in cluster.prefills),
            "refused_blocks": sum(node.store.num_refused for node in cluster.prefills),
            "preemptions": sum(node.machine.num_preemptions for node in cluster.decodes),
            "device_s": sum(journey.prefill_s for journey in journeys),
        },
    )


def _timed(result: SimulationResult, wall_s: float) -> SimulationResult:
    from dataclasses import replace

    return replace(result, wall_s=wall_s)
