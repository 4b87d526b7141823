"""The policy moonserve without one of its terms. A module of its own, so that processes can unpickle its class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moonserve.conductor.placement.policies.least_added_delay import LeastAddedDelay, Weights
from moonserve.traces.experiments.parallel_runs import ClusterRun
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.disaggregated import DisaggregatedCluster
from moonserve.traces.simulator.cluster.event_loop import Event, EventLoop
from moonserve.traces.simulator.cluster.run import request_states_of
from moonserve.traces.simulator.results import SimulationResult
from moonserve.traces.simulator.spec import ClusterSpec

ABLATIONS: Mapping[str, Weights] = {
    "all terms": Weights(),
    "without the order (patience 0)": Weights(patience=0.0),
    "without the objective as a bound": Weights(keeps_objective=False),
    "without a price": Weights(served_steepness=None),
    "without counting whom it delays": Weights(counts_delayed=False),
    "without the order of arrival": Weights(by_arrival=False),
    "without a price of copies": Weights(copy=0.0),
    "with the price of prompts that are rejected": Weights(served_steepness=4.0),
}


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A run of the policy with other terms."""

    cost: ClassVar[float] = 1.0
    run: ClusterRun
    terms: Weights

    def check(self) -> None:
        self.run.check()

    def do(self, records: Sequence[TraceRecord]) -> SimulationResult:
        spec = self.run.spec
        assert isinstance(spec, ClusterSpec)
        scaled = self.run.records(records)
        requests = request_states_of(scaled, spec.block_size, spec.model.max_model_len)
        cluster = DisaggregatedCluster(spec, requests)
        # Policies without a term have no name in the registry.
        cluster.conductor._planner.policy = LeastAddedDelay(self.terms)
        clock: EventLoop[Event] = EventLoop()
        clock.run(cluster.begin(), cluster.handle)
        return SimulationResult(
            name=spec.policy,
            outcomes=tuple(request.outcome(scaled[0].arrived_s) for request in requests),
            ttft_slo_s=spec.ttft_slo_s,
            tbt_slo_s=spec.tbt_slo_s,
            duration_s=clock.now,
            counters=cluster.counters,
        )
