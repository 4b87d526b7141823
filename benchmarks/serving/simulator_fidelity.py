"""`python -m benchmarks.serving.simulator_fidelity --trace FILE`: compares a live replay of a trace with its
simulation.

Claim: TTFT p50 and p90, TBT p50, hit ratio and throughput of a live replay and of its simulation agree within 15 %, for
one and two prefill workers with one decode worker, with fast and with slow kernels; and half of the live TTFTs are
predicted within 15 %. In each round of each shape, `moonserve profile --serving` measures a cluster, a fresh cluster
serves the scaled trace, and `traces.simulator` runs the same records on the profile. The simulation uses no data of the
replay. Results are medians over the rounds. Writes docs/fidelity.md, and JSON below out/.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.measure import write_json
from benchmarks.serving.simulator_fidelity_report import (
    BAR,
    FIGURES,
    LENGTHS,
    MORE_FIGURES,
    OUTPUTS,
    PREDICTION_BAR,
    Row,
    as_page,
    combine_rounds,
    lost_hits,
    means,
    prediction_errors,
    rows_of,
    write_csv,
)
from moonserve.conductor.placement.policies import POLICY_NAMES, PUBLISHED_POLICY
from moonserve.deploy.diagnostics.profile import ProfileConfig
from moonserve.deploy.diagnostics.profile import run as profile
from moonserve.deploy.diagnostics.profile_cluster import ClusterShape
from moonserve.protocol.latency import mean, percentile
from moonserve.protocol.process.machine import processor
from moonserve.traces.client import StreamClient
from moonserve.traces.format import TraceRecord, read_trace
from moonserve.traces.replay import ReplayConfig, ReplayResult, build_report, send_trace
from moonserve.traces.request_metrics import CompletedRequest, latency_metrics, request_metrics, spread_ms
from moonserve.traces.simulator.cluster.disaggregated import DisaggregatedCluster
from moonserve.traces.simulator.cluster.event_loop import Event, EventLoop
from moonserve.traces.simulator.cluster.request_state import RequestState
from moonserve.traces.simulator.cluster.run import request_states_of
from moonserve.traces.simulator.results import End
from moonserve.traces.simulator.spec import ClusterSpec, ModelProfile

BLOCK_SIZE = 32  # 512 tokens of the trace by LENGTHS
CHUNK = 512
DRAM = 512 << 20
VLLM = "vllm"  # among the kernels: vLLM as the engine
VLLM_FLAGS = (
    *("--engine", "vllm", "--dtype", "float32", "--kv-cache-memory", str(256 << 20), "--vllm.enforce-eager"),
    *(f"--vllm.block-size={BLOCK_SIZE}", f"--vllm.max-num-batched-tokens={CHUNK}", "--vllm.max-num-seqs=64"),
)
TTFT_SLO_S = 30.0
TBT_SLO_S = 1.0  # loose, here and live, so that nothing is rejected

Decision = dict[str, Any]  # `conductor.placement.decision` as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Part of the trace that is replayed, and its speed."""

    trace: Path
    limit: int
    speedup: float
    policy: str

    def records(self) -> list[TraceRecord]:
        return [record.scaled(LENGTHS, OUTPUTS, self.speedup) for record in read_trace(self.trace, self.limit)]


class Shape(NamedTuple):
    """Shape of a measured cluster."""

    num_prefill: int
    num_decode: int
    kernels: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    load = Load(
        trace=arguments.trace,
        limit=arguments.limit,
        speedup=arguments.speedup,
        policy=arguments.placement_policy,
    )
    shapes = [
        Shape(int(num_prefill), int(num_decode), kernels)
        for kernels in arguments.kernels.split(",")
        for num_prefill, _, num_decode in (s.partition("x") for s in arguments.shapes.split(","))
    ]
    compared = [
        with_verdicts(
            combine_rounds(
                [
                    compare(load, shape, arguments.budget_s, folder)
                    for folder in _folders(arguments.output.parent, arguments.rounds)
                ]
            )
        )
        for shape in shapes
    ]
    replayed = {
        "trace": load.trace.name,
        "requests": load.limit,
        "speedup": load.speedup,
        "policy": load.policy,
    }
    result = {"machine": _machine(), "load": replayed, "shapes": compared}
    page = as_page(result)
    print(page)
    write_json(arguments.output, result)
    arguments.page.write_text(page)
    return 0 if all(shape["met"] and shape["predictions_met"] for shape in compared) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="the conversation trace")
    parser.add_argument("--limit", type=int, default=300, help="first requests of the trace")
    parser.add_argument("--speedup", type=float, default=1.0, help="factor on the trace's clock")
    parser.add_argument("--rounds", type=int, default=3, help="of each shape")
    parser.add_argument("--placement-policy", default=PUBLISHED_POLICY, choices=POLICY_NAMES)
    parser.add_argument("--kernels", default="native,torch", help="of the workers, commas; vllm = their engine")
    parser.add_argument("--shapes", default="1x1,2x1", help="prefill x decode workers, commas")
    parser.add_argument("--budget-s", type=float, default=120.0, help="of each profile")
    parser.add_argument("--output", type=Path, default=Path("out/fidelity.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/fidelity.md"))
    return parser


def _folders(parent: Path, num_rounds: int) -> list[Path]:
    """Returns a folder per round for its tables."""
    return [parent / f"fidelity-{number}" for number in range(1, num_rounds + 1)]


def with_verdicts(shape: dict[str, Any]) -> dict[str, Any]:
    """Returns the shape with verdicts: `met` and `predictions_met` say if its errors keep the claims."""
    return {
        **shape,
        "met": all(abs(shape["errors"][name]) <= BAR for name in FIGURES),
        "predictions_met": shape["live"]["prediction_error"] <= PREDICTION_BAR,
    }


def compare(load: Load, shape: Shape, budget_s: float, folder: Path) -> dict[str, Any]:
    """Runs one round of a shape: profile, replay, simulation. Writes each request's terms to a CSV file in `folder`."""
    num_prefill, num_decode = shape.num_prefill, shape.num_decode
    cluster = ClusterShape(
        model=None,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_threads=1,
        flags=(
            *("--dram", str(DRAM), "--tbt-slo", str(TBT_SLO_S), "--placement-policy", load.policy),
            *(VLLM_FLAGS if shape.kernels == VLLM else ("--block-size", str(BLOCK_SIZE), "--kernels", shape.kernels)),
        ),
    )
    engine: dict[str, Any] = {"kernels": shape.kernels}
    if shape.kernels == VLLM:
        engine = {"engine": "vllm", "vllm": ("enforce-eager",), "dtype": "float32"}
    model = profile(
        ProfileConfig(
            serving=True,
            prefill_workers=num_prefill,
            decode_workers=num_decode,
            block_size=BLOCK_SIZE,
            dram=DRAM,
            max_num_batched_tokens=CHUNK,
            budget_s=budget_s,
            **engine,
            load_prompt_tokens=round(mean([record.input_length for record in load.records()])),
            load_answer_tokens=round(mean([record.output_length for record in load.records()])),
        )
    )
    replayed, decisions = replay_live(cluster, load)
    spec = spec_of(model, num_prefill, num_decode, load.policy)
    requests = requests_after(spec, load.records())
    rows = rows_of(replayed.sent, decisions, requests)
    write_csv(rows, folder / f"{num_prefill}x{num_decode}-{shape.kernels}.csv")
    live, simulated = live_figures(replayed, rows), figures_of(spec, requests)
    errors = {name: relative(simulated[name], live[name]) for name in FIGURES | MORE_FIGURES}
    return {
        "prefill": num_prefill,
        "decode": num_decode,
        "kernels": shape.kernels,
        "profile": _terms(model),
        "live": live,
        "simulated": simulated,
        "errors": errors,
        "means": means(rows),
        "prediction_errors": prediction_errors(rows),
        "lost_hits": lost_hits(rows),
        "ttfts_ms": {int(row["index"]): row["live_placed_ttft_ms"] for row in rows},
    }


def relative(simulated: float, live: float) -> float:
    """Returns (simulated − live) ÷ live; 0 if both are 0."""
    if live == simulated:
        return 0.0
    return (simulated - live) / live if live else float("inf")


# -- live


def replay_live(shape: ClusterShape, load: Load) -> tuple[ReplayResult, list[Decision | None]]:
    """Replays against a fresh cluster. Returns the replay and the conductor's decision on each request."""
    with shape.running() as cluster:
        asyncio.run(_warm_up(cluster.url, shape.num_prefill))
        return asyncio.run(_replay(_replay_config(cluster.url, load)))


async def _replay(config: ReplayConfig) -> tuple[ReplayResult, list[Decision | None]]:
    replayed = await send_trace(config)
    async with StreamClient(config.url) as client:
        decisions = [await client.explain(sent.outcome.request_id) for sent in replayed.sent]
    return replayed, decisions


def live_figures(replayed: ReplayResult, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the report of a replay, and the error of the conductor's predictions."""
    report = build_report(replayed.sent, duration_s=replayed.duration_s, ttft_slo_s=TTFT_SLO_S, tbt_slo_s=TBT_SLO_S)
    return {**report, "prediction_error": prediction_errors(rows)["ttft"]}


def _replay_config(url: str, load: Load) -> ReplayConfig:
    return ReplayConfig(
        trace=str(load.trace),
        url=url,
        limit=load.limit,
        scale_lengths=LENGTHS,
        scale_outputs=OUTPUTS,
        speedup=load.speedup,
        ttft_slo=TTFT_SLO_S,
        tbt_slo=TBT_SLO_S,
    )


async def _warm_up(url: str, num_prefill: int) -> None:
    """Opens connections and touches memory on each prefill worker; simulations do not include either."""
    async with StreamClient(url) as client:
        facts = await client.model(None)
        for token in range(20, 23):
            prompts = [[token + machine] * 300 for machine in range(num_prefill)]
            await asyncio.gather(*(client.complete(facts.name, prompt, max_tokens=16) for prompt in prompts))


# -- simulated


def spec_of(model: ModelProfile, num_prefill: int, num_decode: int, policy: str = PUBLISHED_POLICY) -> ClusterSpec:
    """Returns the spec of a cluster with the defaults of `moonserve serve`, except the policy."""
    return ClusterSpec(
        model=model,
        num_prefill=num_prefill,
        num_decode=num_decode,
        policy=policy,
        ttft_slo_s=TTFT_SLO_S,
        tbt_slo_s=TBT_SLO_S,
        block_size=BLOCK_SIZE,
        chunk_tokens=CHUNK,
        mixes_prompts=True,
    )


def requests_after(spec: ClusterSpec, records: Sequence[TraceRecord]) -> list[RequestState]:
    """Simulates the requests in virtual time."""
    requests = request_states_of(records, spec.block_size, spec.model.max_model_len)
    cluster = DisaggregatedCluster(spec, requests)
    clock: EventLoop[Event] = EventLoop()
    clock.run(cluster.begin(), cluster.handle)
    return requests


def figures_of(spec: ClusterSpec, requests: Sequence[RequestState]) -> dict[str, Any]:
    """Returns the figures of a replay's report for simulated requests."""
    completed = [request for request in requests if request.end is End.COMPLETED]
    figures = [_completed(request, spec) for request in completed]
    # A replay's clock starts with the replay, not with its first request.
    duration_s = max((request.ended_at for request in requests), default=0.0)
    return {
        **request_metrics(
            figures,
            num_requests=len(requests),
            num_rejected=sum(request.end is End.REJECTED for request in requests),
            duration_s=duration_s,
            ttft_slo_s=spec.ttft_slo_s,
            tbt_slo_s=spec.tbt_slo_s,
        ),
        **latency_metrics(figures),
        **spread_ms("itl_ms", [gap for request in completed for gap in request.gaps_s]),
        "prediction_error": prediction_error(requests),
    }


def _completed(request: RequestState, spec: ClusterSpec) -> CompletedRequest:
    outcome = request.outcome(0.0)
    assert request.first_token_at is not None, "it completed"
    return CompletedRequest(
        input_tokens=outcome.input_length,
        cached_tokens=outcome.cached_tokens,
        output_tokens=request.num_generated,
        ttft_s=outcome.ttft_s,
        tbt_s=outcome.tbt_s,
        tpot_s=outcome.mean_gap_s,
        e2e_s=request.ended_at - request.record.arrived_s,
        is_effective=outcome.is_effective(ttft_slo_s=spec.ttft_slo_s, tbt_slo_s=spec.tbt_slo_s),
    )


def prediction_error(requests: Sequence[RequestState]) -> float:
    """Returns the p50 of |predicted − actual| ÷ actual, for the TTFT from placement on."""
    errors = [
        abs(request.predicted_ttft_s - actual_s) / actual_s
        for request in requests
        if request.first_token_at is not None and (actual_s := request.first_token_at - request.placed_at) > 0
    ]
    return percentile(errors, 50)


# -- figures


def _terms(model: ModelProfile) -> dict[str, Any]:
    return {
        "prefill": [model.prefill.c0, model.prefill.c1, model.prefill.c2],
        "decode": [model.decode.c0, model.decode.c1, model.decode.c2],
        "request_ms": model.overheads.request_s * 1e3,
        "gateway_ms": model.overheads.gateway_s * 1e3,
        "back_ms": model.overheads.back_s * 1e3,
        "late_back_ms": model.overheads.late_back_s * 1e3,
        "turnover_ms": model.overheads.turnover_s * 1e3,
        "landing_ms": model.overheads.landing_s * 1e3,
        "handoff_ms": model.overheads.handoff_s * 1e3,
        "crowding_prefill": list(model.crowding.prefill),
        "prefills_prefill": list(model.crowding.prefill_beside_prefills),
        "crowding_decode": list(model.crowding.decode),
        "crowding_batch": list(model.crowding.decode_batch),
        "crowding_request": list(model.crowding.request),
        "prefills_request": list(model.crowding.request_beside_prefills),
        "crowding_landing": list(model.crowding.landing),
        "prefills_landing": list(model.crowding.landing_beside_prefills),
        "crowding_handoff": list(model.crowding.handoff),
    }


def _machine() -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
