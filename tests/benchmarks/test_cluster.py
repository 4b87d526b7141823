"""Tests of the benchmarks of whole clusters, simulated and live, each with a few requests."""

import asyncio
from typing import Any

from benchmarks.conductor import admission, conditional_disaggregation, placement_policies
from benchmarks.conductor.placement_policies import as_page
from benchmarks.serving.coupled import cluster_of
from moonserve.conductor.placement.policies.least_added_delay import Weights
from moonserve.protocol.step_time import CHUNK_SHARE
from moonserve.traces.client import StreamClient
from moonserve.traces.format import TraceRecord


def records(count: int, every_s: float, longest: int) -> list[TraceRecord]:
    """Returns alternating long and short prompts, which arrive faster than machines compute them."""
    lengths = (longest, 400)
    return [
        TraceRecord(
            arrived_s=number * every_s,
            input_length=lengths[number % 2],
            output_length=4,
            hash_ids=tuple(range(1_000 * number, 1_000 * number + -(-lengths[number % 2] // 512))),
        )
        for number in range(count)
    ]


def test_admission_variants_differ_and_each_setting_has_a_row() -> None:
    setting = admission.Setting(speedup=3.0, num_requests=10)
    runs = {way.name: setting.run(way, None) for way in admission.VARIANTS}
    assert len({run.spec.admission for run in runs.values()}) == 4
    row = {name: admission.figures(run.do(records(10, 0.1, 16_000))) for name, run in runs.items()}
    assert setting.name in admission.as_table([(setting, row)])


def test_conditional_disaggregation_prefills_where_prompts_are_decoded() -> None:
    runs = [
        conditional_disaggregation.run_of(conditional_disaggregation.POLICIES[0], 1.0, share)
        for share in (None, CHUNK_SHARE)
    ]
    without, beside = (
        conditional_disaggregation.row_of(run, conditional_disaggregation.figures(run.do(records(60, 0.1, 60_000))))
        for run in runs
    )
    assert without["undivided"] == 0.0
    assert beside["undivided"] > 0.3
    assert beside["p50_ttft_s"] < without["p50_ttft_s"]
    assert "| global-cache-aware | 1× | no |" in conditional_disaggregation.as_table([without, beside])


def test_policies_are_compared_at_algorithm_1s_best_threshold_and_terms_can_be_left_out() -> None:
    scenario = placement_policies.Scenario(
        trace=placement_policies.PUBLISHED, speedup=2.0, num_prefill=2, num_decode=1, thresholds=(1.0, 1.25)
    )
    given = records(60, 0.25, 16_000)
    measured = [(run, placement_policies.figures(run.do(given))) for run in scenario.runs(None)]
    row = placement_policies.compared(scenario, measured)
    assert row["threshold"] in (1.0, 1.25)
    assert row["algorithm_1"]["mean_ttft_s"] == min(row["thresholds"].values())
    run = measured[0][0]
    whole = placement_policies.figures(placement_policies.Ablation(run=run, terms=Weights()).do(given))
    assert whole == measured[0][1]
    ablated: dict[str, Any] = {"trace": "t", "speedup": 2.0, "requests": 60}
    ablations = dict.fromkeys(placement_policies.ABLATIONS, whole)
    assert "conversation (published)" in as_page({"rows": [row], "ablations": ablations, "ablated": ablated})


def test_the_coupled_side_of_the_live_comparison_serves_and_shares_prefixes() -> None:
    """On real processes, a later prompt reuses the first one's blocks. Until a heartbeat reports them to the conductor,
    the next prompt may go to the worker that lacks them."""
    first, *others = asyncio.run(_cached_tokens())
    assert first == 0
    assert others[-1] == 96


async def _cached_tokens() -> list[int]:
    """Sends prompts with a common prefix one by one until one has cached tokens; returns all counts."""
    found: list[int] = []
    async with cluster_of("coupled") as url, StreamClient(url) as client:
        facts = await client.model(None)
        while len(found) < 20 and not any(found):
            prompt = [*range(20, 120), *[200 + len(found)] * 40]
            outcome = await client.complete(facts.name, prompt, max_tokens=5)
            assert outcome.succeeded
            found.append(outcome.cached_tokens)
    return found
