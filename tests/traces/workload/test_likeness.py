"""Tests that a likeness of a trace has the same statistics and obeys the trace format."""

from itertools import islice, takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TraceRecord, read_checked
from moonserve.traces.workload.generator import ArrivalSpec, WorkloadSpec, requests_of
from moonserve.traces.workload.likeness import FittedTrace, fit_trace, records_like
from moonserve.traces.workload.prefix_reuse import BlockIds, Chain, Prompt, PromptHistory, ReuseTarget
from moonserve.traces.workload.statistics import analyze
from tests.thoroughness import TRACE, examples, needs_trace
from tests.traces.made import write_small
from tests.traces.workload.test_generator import check_laws, specs


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[TraceRecord]:
    return read_checked(write_small(tmp_path_factory.mktemp("small") / "small.jsonl"))


def assert_alike(given_trace: dict[str, Any], likeness: dict[str, Any]) -> None:
    """Asserts means within 3 %, percentiles 10 to 95 within 5 %, the ideal ratio within 0.02, the curve within 0.03,
    and uses of a prefix within 1.5× or one use (2.5× from rank 2 to 100, where single sessions decide)."""
    for name in ("input_length", "output_length"):
        assert likeness[name]["mean"] == pytest.approx(given_trace[name]["mean"], rel=0.03)
        for percent in ("p10", "p25", "p50", "p75", "p90", "p95"):
            expected = pytest.approx(given_trace[name][percent], rel=0.05, abs=2)
            assert likeness[name][percent] == expected, (name, percent)
    assert likeness["cache_ratio"] == pytest.approx(given_trace["cache_ratio"], abs=0.02)
    curves = zip(given_trace["lru"]["curve"], likeness["lru"]["curve"], strict=True)
    for mine, other in curves:
        assert other["hit_ratio"] == pytest.approx(mine["hit_ratio"], abs=0.03), mine
    uses = {point["rank"]: point["uses"] for point in likeness["prefixes"]["popularity"]}
    for point in given_trace["prefixes"]["popularity"]:
        nearest = min(uses, key=lambda rank: abs(rank - point["rank"]))
        factor = 2.5 if 1 < point["rank"] <= 100 else 1.5
        low, high = sorted((point["uses"], uses[nearest]))
        assert high <= max(low * factor, low + 1), point


@pytest.mark.parametrize("seed", range(2))
def test_the_statistics_of_a_small_trace_carry_over(small: list[TraceRecord], seed: int) -> None:
    records = list(islice(records_like(fit_trace(small), Random(seed)), len(small)))
    check_laws(records)
    assert_alike(analyze(small), analyze(records))


@needs_trace
@pytest.mark.trace
@pytest.mark.slow
def test_the_statistics_of_the_public_trace_carry_over() -> None:
    given_trace = read_checked(TRACE)
    records = list(islice(records_like(fit_trace(given_trace), Random(0)), len(given_trace)))
    check_laws(records)
    mine, other = analyze(given_trace), analyze(records)
    assert_alike(mine, other)
    for window, dispersion in mine["arrivals"]["dispersion"].items():
        assert other["arrivals"]["dispersion"][window] == pytest.approx(dispersion, rel=0.5)
    share = mine["sessions"]["extending_share"]
    assert other["sessions"]["extending_share"] == pytest.approx(share, abs=0.02)


def test_a_longer_trace_goes_on_like_the_second_half(small: list[TraceRecord]) -> None:
    """At three times the length, the rate stays the same, and hits rise by at most 0.06, as the cold start fades."""
    model = fit_trace(small)
    records = until(model, 3 * model.duration_s)
    check_laws(records)
    statistics = analyze(records)
    assert statistics["arrivals"]["mean_rate"] == pytest.approx(model.rate, rel=0.15)
    cold = analyze(small)["cache_ratio"]
    assert cold - 0.02 < statistics["cache_ratio"] < cold + 0.06


def test_a_higher_rate_keeps_think_times(small: list[TraceRecord]) -> None:
    """At four times the rate, gaps within sessions stay the same, and the cache needs more room for the same hits."""
    model = fit_trace(small)
    records = until(model, model.duration_s, rate=4)
    check_laws(records)
    mine, other = analyze(small), analyze(records)
    assert other["arrivals"]["mean_rate"] == pytest.approx(4 * model.rate, rel=0.15)
    gap_s = mine["sessions"]["turn_gap_s"]["p50"]
    assert other["sessions"]["turn_gap_s"]["p50"] == pytest.approx(gap_s, rel=0.15)
    assert other["cache_ratio"] == pytest.approx(mine["cache_ratio"], abs=0.03)
    assert other["lru"]["curve"][0]["hit_ratio"] < mine["lru"]["curve"][0]["hit_ratio"] - 0.02


def test_arrivals_can_be_replaced(small: list[TraceRecord]) -> None:
    spec = ArrivalSpec(rate=2, process="constant")
    records = list(islice(records_like(fit_trace(small), Random(0), arrivals=spec), 1000))
    check_laws(records)
    arrivals = analyze(records)["arrivals"]
    assert arrivals["gap_cv"] == pytest.approx(0, abs=1e-6)
    assert arrivals["mean_rate"] == pytest.approx(2)


def until(model: FittedTrace, duration_s: float, rate: float = 1.0) -> list[TraceRecord]:
    records = records_like(model, Random(0), rate=rate)
    return list(takewhile(lambda record: record.arrived_s < duration_s, records))


@settings(deadline=None, max_examples=examples(40))
@given(specs(), st.integers(0, 3), st.floats(0.1, 10), st.integers(1, 300))
def test_a_likeness_of_any_trace_obeys_the_format(spec: WorkloadSpec, seed: int, rate: float, remembered: int) -> None:
    model = fit_trace(list(islice(requests_of(spec, Random(seed)), 120)))

    def made() -> list[TraceRecord]:
        records = records_like(model, Random(seed), rate=rate, remembered=remembered)
        return list(islice(records, 300))

    check_laws(made())
    assert made() == made()


def test_a_trace_with_too_few_requests_is_refused(small: list[TraceRecord]) -> None:
    with pytest.raises(ConfigError, match="19 requests are too few"):
        fit_trace(small[:19])
    with pytest.raises(ConfigError, match="all requests come at once"):
        fit_trace([small[0]] * 20)


def prompt(at_s: float, chain: Chain, *, shared: int = 0, uses: int = 1, prefix: int | None = None) -> Prompt:
    return Prompt(
        arrived_s=at_s,
        chain=chain,
        input_length=len(chain) * 512,
        whole=len(chain),
        shared=shared,
        uses=uses,
        prefix=None if prefix is None else (prefix, 0),
    )


def target(blocks: int, *, left: int = 0, turn: int = 0) -> ReuseTarget:
    """Returns a target with arrival time 0 at time 100 s."""
    return ReuseTarget(prefix=None, blocks=blocks, most=1_000, left=left, arrived_s=0, now_s=100, turn=turn, uses=1)


@given(st.integers(0, 1_000), st.integers(1, 30))
def test_only_the_latest_prompts_are_remembered(seed: int, limit: int) -> None:
    random, ids, past = Random(seed), BlockIds(), PromptHistory(limit)
    for second in range(100):
        length = random.randrange(1, 6)
        prefix = random.choice([None, 1, 2])
        chain, shared, uses = ids.extend((), length), random.randrange(length), random.randrange(1, 3)
        past.add(prompt(second, chain, shared=shared, uses=uses, prefix=prefix))
        past.validate()
    assert len(past) == limit
    found = past.private(target(1, left=1))
    assert found is None or found.arrived_s >= 100 - limit


def test_a_prompt_that_another_has_extended_is_not_extended_again() -> None:
    past, ids = PromptHistory(), BlockIds()
    past.add(prompt(0, ids.extend((), 4)))
    first = past.session(target(4, turn=1))
    assert first is not None
    first.taken = 4
    assert past.session(target(4, turn=1)) is None
    assert past.private(target(3, left=1)) is None


def test_a_popular_prefix_is_found_by_its_depth() -> None:
    past, ids = PromptHistory(), BlockIds()
    past.add(prompt(0, ids.extend((), 9), shared=3, uses=5))
    past.add(prompt(1, ids.extend((), 9), shared=6, uses=5))
    found = past.popular(target(6))
    assert found is not None
    assert found.arrived_s == 1
