"""Tests that a likeness of a trace has the same statistics and obeys the trace format."""

from collections import Counter
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
    assert likeness["sessions"]["turns"]["max"] == given_trace["sessions"]["turns"]["max"]
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
@given(specs(), st.integers(0, 3), st.floats(0.1, 10))
def test_a_likeness_of_any_trace_obeys_the_format(spec: WorkloadSpec, seed: int, rate: float) -> None:
    model = fit_trace(list(islice(requests_of(spec, Random(seed)), 120)))

    def made() -> list[TraceRecord]:
        return list(islice(records_like(model, Random(seed), rate=rate), 300))

    check_laws(made())
    assert made() == made()


def test_a_trace_with_too_few_requests_is_refused(small: list[TraceRecord]) -> None:
    with pytest.raises(ConfigError, match="19 requests are too few"):
        fit_trace(small[:19])
    with pytest.raises(ConfigError, match="all requests come at once"):
        fit_trace([small[0]] * 20)


def test_only_widely_shared_blocks_are_shared_by_draws() -> None:
    """24 users begin with one system prompt; each asks twice about an own document."""
    chains = [(0, 1 + user, 100 + 2 * user + turn) for turn in range(2) for user in range(24)]
    given_trace = [
        TraceRecord(arrived_s=float(second), input_length=1200 + chain[1], output_length=1, hash_ids=chain)
        for second, chain in enumerate(chains)
    ]
    records = list(islice(records_like(fit_trace(given_trace), Random(0)), 240))
    check_laws(records)
    assert {record.hash_ids[0] for record in records} == {0}
    readers = Counter(record.hash_ids[1] for record in records)
    assert max(readers.values()) == 2
    assert list(readers.values()).count(2) > 90
    lengths: dict[int, set[int]] = {}
    for record in records:
        lengths.setdefault(record.hash_ids[1], set()).add(record.input_length)
    assert all(len(of_document) == 1 for of_document in lengths.values())
    assert len(set.union(*lengths.values())) == 24
