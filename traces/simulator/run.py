"""Runs one simulation: builds the requests, runs the clock, collects the result."""

from __future__ import annotations

import time
from collections.abc import Sequence

from protocol.errors import ConfigError
from traces.format import TraceRecord
from traces.simulator.clock import Clock
from traces.simulator.cluster import Cluster
from traces.simulator.conditional import ConditionalCluster
from traces.simulator.coupled import CoupledCluster
from traces.simulator.events import Event
from traces.simulator.journey import Journey
from traces.simulator.results import SimulationResult
from traces.simulator.roles import SwitchingCluster
from traces.simulator.sampling import key_of
from traces.simulator.spec import ClusterSpec, CoupledSpec


def simulate(spec: ClusterSpec | CoupledSpec, records: Sequence[TraceRecord], *, name: str = "") -> SimulationResult:
    """Simulates a cluster that serves a trace. Equal arguments give equal results, except for `wall_s`.

    Raises ConfigError if the spec or the trace cannot be simulated.
    """
    began_s = time.perf_counter()
    journeys = journeys_of(records, spec.block_size, spec.model.max_model_len)
    cluster = CoupledCluster(spec, journeys) if isinstance(spec, CoupledSpec) else cluster_of(spec, journeys)
    clock: Clock[Event] = Clock()
    clock.run(cluster.begin(), cluster.handle)
    began_at = min((journey.record.arrived_s for journey in journeys), default=0.0)
    ended_at = max((journey.ended_at for journey in journeys), default=began_at)
    return SimulationResult(
        name=name or spec.policy,
        outcomes=tuple(journey.outcome(began_at) for journey in journeys),
        ttft_slo_s=spec.ttft_slo_s,
        tbt_slo_s=spec.tbt_slo_s,
        duration_s=ended_at - began_at,
        instances=tuple(cluster.samples.instances),
        replicas=tuple(cluster.samples.replicas),
        counters={"events": clock.num_events, **cluster.counters},
        wall_s=time.perf_counter() - began_s,
    )


def cluster_of(spec: ClusterSpec, journeys: Sequence[Journey]) -> Cluster:
    """Returns the cluster that a spec describes. Raises ConfigError for an invalid spec."""
    if spec.conditional:
        return ConditionalCluster(spec, journeys)
    return Cluster(spec, journeys) if spec.roles is None else SwitchingCluster(spec, journeys)


def journeys_of(records: Sequence[TraceRecord], block_size: int, max_model_len: int) -> list[Journey]:
    """Returns one journey per request. An answer has at least one token and ends at the model's maximum length.

    Raises ConfigError if the trace's hash ids stand for a different block size.
    """
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
