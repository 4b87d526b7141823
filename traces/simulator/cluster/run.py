"""Runs one simulation: builds the requests, runs the clock, collects the result."""

import time
from collections.abc import Callable, Iterable, Sequence

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.conditional_disaggregation import ConditionalCluster
from moonserve.traces.simulator.cluster.coupled import CoupledCluster
from moonserve.traces.simulator.cluster.disaggregated import DisaggregatedCluster
from moonserve.traces.simulator.cluster.event_loop import Event, EventLoop, TimedEvent
from moonserve.traces.simulator.cluster.heartbeats_and_samples import block_key_of
from moonserve.traces.simulator.cluster.request_state import Phase, RequestState
from moonserve.traces.simulator.cluster.role_switching import SwitchingCluster
from moonserve.traces.simulator.results import SimulationResult
from moonserve.traces.simulator.spec import ClusterSpec, CoupledSpec

_EVENTS_BETWEEN_REPORTS = 1024


def simulate(
    spec: ClusterSpec | CoupledSpec,
    records: Sequence[TraceRecord],
    *,
    name: str = "",
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Simulates a cluster that serves a trace. Equal arguments give equal results, except for `wall_s`.

    `progress` is told now and then how many requests have ended. Raises ConfigError for an invalid spec or trace.
    """
    began_s = time.perf_counter()
    requests = request_states_of(records, spec.block_size, spec.model.max_model_len)
    cluster = CoupledCluster(spec, requests) if isinstance(spec, CoupledSpec) else cluster_of(spec, requests)
    clock: EventLoop[Event] = EventLoop()

    def handle(event: Event, now: float) -> Iterable[TimedEvent[Event]]:
        if progress is not None and clock.num_events % _EVENTS_BETWEEN_REPORTS == 0:
            progress(sum(request.phase is Phase.ENDED for request in requests))
        return cluster.handle(event, now)

    clock.run(cluster.begin(), handle)
    began_at = min((request.record.arrived_s for request in requests), default=0.0)
    ended_at = max((request.ended_at for request in requests), default=began_at)
    return SimulationResult(
        name=name or spec.policy,
        outcomes=tuple(request.outcome(began_at) for request in requests),
        ttft_slo_s=spec.ttft_slo_s,
        tbt_slo_s=spec.tbt_slo_s,
        duration_s=ended_at - began_at,
        instances=tuple(cluster.samples.instances),
        replicas=tuple(cluster.samples.replicas),
        counters={"events": clock.num_events, **cluster.counters},
        wall_s=time.perf_counter() - began_s,
    )


def cluster_of(spec: ClusterSpec, requests: Sequence[RequestState]) -> DisaggregatedCluster:
    """Returns the cluster that a spec describes. Raises ConfigError for an invalid spec."""
    if spec.conditional:
        return ConditionalCluster(spec, requests)
    return DisaggregatedCluster(spec, requests) if spec.roles is None else SwitchingCluster(spec, requests)


def request_states_of(records: Sequence[TraceRecord], block_size: int, max_model_len: int) -> list[RequestState]:
    """Returns one request per request. An answer has at least one token and ends at the model's maximum length.

    Raises ConfigError if the trace's hash ids stand for a different block size.
    """
    if any(record.tokens_per_hash != block_size for record in records):
        raise ConfigError(
            f"the trace's hash ids stand for {records[0].tokens_per_hash} tokens and blocks have"
            f" {block_size}: make --block-size equal"
        )
    requests = []
    for index, record in enumerate(records):
        room = max_model_len - record.input_length
        num_full = record.input_length // block_size
        requests.append(
            RequestState(
                index=index,
                record=record,
                num_outputs=max(min(record.output_length, room), 1),
                keys=tuple(block_key_of(hash_id) for hash_id in record.hash_ids[:num_full]),
            )
        )
    return requests
