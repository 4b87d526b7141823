"""`benchmarks.reproduction`: the findings of its figures for invented results, and the files that it writes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reproduction import arxiv_cache_policies_overload, figures_1_5_8
from benchmarks.reproduction.__main__ import FIGURES, main, to_json
from benchmarks.reproduction.published_figure import CONVERSATION, FigureResult, PublicTrace
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.results import End, SimulationResult
from tests.traces.made import write_sessions
from tests.traces.reports import made_up
from tests.traces.reports.document import Document

RECORDS = [TraceRecord(arrived_s=float(n), input_length=1024, output_length=10, hash_ids=(0, n + 1)) for n in range(10)]
SUBJECT = PublicTrace(name="conversation_trace.jsonl", kind=CONVERSATION, records=RECORDS)


def result(*, ttft_s: float = 1.0, num_slow: int = 0, num_rejected: int = 0) -> SimulationResult:
    """Returns ten requests: the first `num_slow` have long gaps, the last `num_rejected` are rejected."""
    outcomes = [
        made_up.outcome(n, ttft_s=ttft_s, tbt_s=1.0 if n < num_slow else 0.05) for n in range(10 - num_rejected)
    ]
    rejected = [made_up.rejected(n) for n in range(10 - num_rejected, 10)]
    return made_up.result("", *outcomes, *rejected, counters={"device_s": 10.0})


def ours(finding: FigureResult) -> dict[str, Any]:
    return {row.what: row.ours for row in finding.rows}


def test_names_of_figures_are_unique_and_runs_are_checked() -> None:
    """Figure names are unique, and every run that a figure requests is valid."""
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    for figure in FIGURES:
        for work in figure.runs(SUBJECT).values():
            work.check()


@pytest.mark.parametrize(
    ("even", "fewer", "order", "ratio"),
    [
        ((20, 5, 4, 3), (20, 5, 4, 3), True, True),
        ((20, 5, 4, 3), (20, 5, 4, 3.9), True, False),
        ((20, 5, 4, 3), (4, 5, 3, 2), False, True),
    ],
)
def test_figure_5_checks_two_claims(even: Sequence[float], fewer: Sequence[float], order: bool, ratio: bool) -> None:
    """The order of policies is checked for both divisions, the ratio for the one with fewer prefill machines."""
    names = ("random", "load balance", "local cache-aware", "global cache-aware")
    ttfts = dict(zip(names, even, strict=True)) | {"moonserve": 1.0}
    ttfts |= {f"{name}, 6 + 10": ttft for name, ttft in zip(names, fewer, strict=True)}
    results = {name: result(ttft_s=ttfts[name]) for name in figures_1_5_8.figure_5_runs(SUBJECT)}
    assert list(figures_1_5_8.FIGURE_5.evaluate(SUBJECT, results).claims.values()) == [order, ratio]


def test_figure_1_finds_the_speed_at_which_each_gain_is_the_published_one() -> None:
    """At every limit, vLLM loses two more requests per step of speed; the pool loses none."""
    works = [(name, *name.rsplit(" ", 1)) for name in figures_1_5_8.figure_1_runs(SUBJECT)]
    speeds = list(dict.fromkeys(float(speed) for _, _, speed in works))
    results = {
        name: result(num_slow=0 if system == "pool" else min(2 * speeds.index(float(speed)), 9))
        for name, system, speed in works
    }
    finding = figures_1_5_8.FIGURE_1.evaluate(SUBJECT, results)
    assert ours(finding)["gain over vLLM at 100 ms, speed 1"] == 0
    left, right = speeds[1], speeds[2]  # gains 0.25 and 0.667
    expected = left + (right - left) * (0.59 - 0.25) / (2 / 3 - 0.25)
    assert ours(finding)["speed at which the gain at 300 ms is the published one"] == pytest.approx(expected)
    assert all(finding.claims.values())


@pytest.mark.parametrize(
    ("counts", "holds"), [((5, 4, 3), [True, True]), ((5, 4, 4), [True, False]), ((4, 4, 3), [False, True])]
)
def test_overload_wants_fewer_rejections_at_each_step(counts: Sequence[int], holds: list[bool]) -> None:
    """The first three ways, which check again at the handoff, are compared; the other two are only listed."""
    counts = (*counts, 9, 8)
    results = {
        name: result(num_rejected=count)
        for name, count in zip(arxiv_cache_policies_overload.overload_runs(SUBJECT), counts, strict=True)
    }
    finding = arxiv_cache_policies_overload.OVERLOAD.evaluate(SUBJECT, results)
    assert list(finding.claims.values())[:2] == holds
    shares = [share for what, share in ours(finding).items() if what.startswith("rejected")]
    assert shares == [count * 100 for count in counts]


def test_overload_tells_what_was_computed_for_nothing_and_rejected_at_the_handoff() -> None:
    results = {name: result(num_rejected=2) for name in arxiv_cache_policies_overload.overload_runs(SUBJECT)}
    baseline, wasteful = next(iter(results)), result(num_rejected=4)
    late = tuple(
        replace(each, reason="tbt_slo_at_handoff", prefill_s=2.0) if each.end is End.REJECTED else each
        for each in wasteful.outcomes
    )
    results[baseline] = replace(wasteful, outcomes=late, counters={"device_s": 16.0})
    rows = ours(arxiv_cache_policies_overload.OVERLOAD.evaluate(SUBJECT, results))
    assert rows[f"at the handoff, {baseline}"] == 400.0
    assert rows[f"prefill time for nothing, {baseline}"] == 0.5
    assert rows[f"effective, {baseline}"] == 0.6


def test_infinite_gains_are_null_in_json() -> None:
    """If vLLM has no effective request, the gain is infinite, which JSON cannot represent."""
    works = figures_1_5_8.figure_1_runs(SUBJECT)
    results = {name: result(num_slow=0 if name.startswith("pool") else 10) for name in works}
    finding = figures_1_5_8.FIGURE_1.evaluate(SUBJECT, results)
    assert "null" in to_json(SUBJECT, [(figures_1_5_8.FIGURE_1, finding)], quick=False)


EASY = "table-2,figure-8,figure-9,figure-11,figure-14"


def reproduce(trace: Path, out: Path, *arguments: str) -> int:
    return main([str(trace), "--out", str(out), "--processes", "1", *arguments])


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_every_figure_of_another_trace(tmp_path: Path) -> None:
    """All figures have rows; those of the conversation trace report that there is nothing to compare with."""
    assert reproduce(write_sessions(tmp_path / "toolagent_trace.jsonl", 12), tmp_path / "out") == 0
    figures = {each["name"]: each for each in results(tmp_path / "out")["figures"]}
    assert list(figures) == [figure.name for figure in FIGURES]
    assert all(each["rows"] for each in figures.values())
    for name in ("figure-1", "figure-5", "figure-8", "figure-9", "figure-15"):
        assert "conversation" in figures[name]["missing"]
        assert all(row["published"] is None for row in figures[name]["rows"])
    assert figures["table-2"]["rows"][0]["published"] == 23_608


def test_a_page_of_published_values_is_simulated_for_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run simulates nothing and gives the same, well-formed page. A JSON row has value, published value and
    ratio, and another public trace in the same folder is in table 2."""
    trace = write_sessions(tmp_path / "conversation_trace.jsonl")
    write_sessions(tmp_path / "synthetic_trace.jsonl", 7)
    out = tmp_path / "out"
    assert reproduce(trace, out, "--only", EASY) == 0
    text, found = (out / "index.html").read_text(), results(out)
    assert "[1/4]" in capsys.readouterr().out
    assert reproduce(trace, out, "--only", EASY) == 0
    assert "0 simulated now" in capsys.readouterr().out
    assert (text, found) == ((out / "index.html").read_text(), results(out))
    Document(text)  # raises if the page is not well-formed
    for figure in FIGURES:
        assert (figure.title in text) == (figure.name in EASY.split(","))
    assert text.count("Why they differ.") == 5
    table, figure_8, *_ = found["figures"]
    plain = figure_8["rows"][0]
    assert (plain["published"], plain["ratio"]) == (1.56, pytest.approx(plain["ours"] / 1.56))
    rows = {row["what"]: row["ours"] for row in table["rows"]}
    assert (rows["conversation: requests"], rows["synthetic: requests"]) == (40, 7)
    assert "toolagent" in table["why"]


def test_a_tenth_is_compared_with_nothing(tmp_path: Path) -> None:
    trace = write_sessions(tmp_path / "conversation_trace.jsonl")
    assert reproduce(trace, tmp_path, "--only", "figure-9", "--quick") == 0
    whole = results(tmp_path)
    assert (whole["num_requests"], bool(whole["figures"][0]["missing"])) == (4, True)
    assert "Only the first tenth" in (tmp_path / "index.html").read_text()
