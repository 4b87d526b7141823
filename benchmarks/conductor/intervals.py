"""`python -m benchmarks.conductor.intervals --trace FILE`: how many answers and TBTs lie in the predicted intervals.

Intervals are to contain 80 %. Simulates the conversation trace with 8 prefill and 8 decode machines and the real
conductor, at several speeds. The width is the median of upper ÷ lower end.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import table
from benchmarks.reproduction.testbed import mooncake_run
from moonserve.conductor.events import Event, Place, Placed, Report
from moonserve.conductor.placement.decision import Decision
from moonserve.protocol.request import RequestId, RequestPhase
from moonserve.traces.format import TraceRecord, read_trace
from moonserve.traces.simulator.cluster.event_loop import EventLoop
from moonserve.traces.simulator.cluster.run import cluster_of, request_states_of
from moonserve.traces.simulator.spec import ClusterSpec

Range = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 2.0, 3.0])
    parser.add_argument("--requests", type=int, default=4_000)
    arguments = parser.parse_args()
    records = read_trace(arguments.trace, arguments.requests)
    rows = [[speed, *_shares(speed, records)] for speed in arguments.speeds]
    print(table(["speed", "requests", "answers inside", "width", "TBTs inside", "width"], rows))


def _shares(speed: float, records: list[TraceRecord]) -> list[Any]:
    run = mooncake_run(speed)
    assert isinstance(run.spec, ClusterSpec)
    requests = request_states_of(run.records(records), run.spec.block_size, run.spec.model.max_model_len)
    cluster = cluster_of(run.spec, requests)
    seen = _Seen()
    handle = cluster.conductor.handle

    def observed(event: Event, now: float) -> Any:
        actions = handle(event, now)
        seen.add(event, actions[-1])
        return actions

    cluster.conductor.handle = observed  # type: ignore[method-assign]
    EventLoop[Any]().run(cluster.begin(), cluster.handle)
    return [len(seen.answers), *_summary(seen.answers), *_summary(seen.tbts_s)]


class _Seen:
    """Predicted intervals and what then happened."""

    def __init__(self) -> None:
        self._decisions: dict[RequestId, Decision] = {}
        self._first_s: dict[RequestId, float] = {}
        self.answers: list[tuple[Range, float]] = []
        self.tbts_s: list[tuple[Range, float]] = []

    def add(self, event: Event, reply: object) -> None:
        match event, reply:
            case Place(request_id=request_id), Placed(decision=decision):
                self._decisions[request_id] = decision
            case Report(request_id=request_id, phase=RequestPhase.FIRST_TOKEN), _:
                self._first_s[request_id] = event.elapsed_s
            case Report(request_id=request_id, phase=RequestPhase.FINISHED), _ if request_id in self._first_s:
                self._end(self._decisions[request_id], event, self._first_s[request_id])

    def _end(self, decision: Decision, report: Report, first_s: float) -> None:
        if decision.output_range is not None:
            self.answers.append((decision.output_range, report.output_tokens))
        if decision.tbt_range_s is not None and report.output_tokens > 1:
            self.tbts_s.append((decision.tbt_range_s, (report.elapsed_s - first_s) / (report.output_tokens - 1)))


def _summary(ends: list[tuple[Range, float]]) -> tuple[str, str]:
    inside = np.mean([low <= actual <= high for (low, high), actual in ends])
    return f"{inside:.3f}", f"{np.median([high / low for (low, high), _ in ends]):.2f}"


if __name__ == "__main__":
    main()
