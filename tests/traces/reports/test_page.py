"""Tests of the report page: it is well-formed, self-contained and deterministic, and omits sections without data. The
data of its drawings is compared with values calculated by hand."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonserve.protocol.errors import ConfigError
from moonserve.traces import plots
from moonserve.traces.output import format_ms, format_ms_as_seconds, format_scaled, format_tick
from moonserve.traces.simulation_report import page, write_page
from moonserve.traces.simulator.results import SimulationResult, results_from_json
from tests.traces.reports.document import Document
from tests.traces.reports.made_up import made_up, outcome, rejected, result, sample

ODD = "a <b> & \"c\" 'd' $x^2$ _e </svg><script>"
COMPUTED = "What first tokens waited for"


def headings(*results: SimulationResult) -> list[str]:
    return Document(page(results)).headings


def test_all_data_is_drawn_and_names_are_escaped() -> None:
    """Special characters in names of results, reasons and instances are escaped in tables, captions and drawings."""
    odd = made_up(ODD)
    odd = replace(odd, outcomes=(outcome(0), rejected(1, "<i>&")), instances=(sample(1.0, "<p>$&", 1),))
    text = page([made_up("plain"), odd])
    document = Document(text)
    assert "<script" not in text
    assert document.text.count(ODD) >= 6
    assert "rejected: <i>&" in document.text
    assert "Best: 1 plain. 87.5% of the requests are effective. TTFT p50 739 ms, p90 2,315 ms" in text
    assert any("<p>$&" in each for each in document.drawings)
    assert any("plain" in each and ODD[:9] in each for each in document.drawings)
    drawn = ["Predicted against actual TTFT", "Replicas of popular blocks", "Load of each instance"]
    assert document.headings == ["Latencies", "Rejections and failures", *drawn, COMPUTED, "Counters"]
    assert len(document.drawings) == 2 + 1 + 2 + 2 + 2


def test_missing_data_is_left_out() -> None:
    assert headings(result("nothing", duration_s=0.0)) == [COMPUTED]
    assert headings(result("zero", outcome(0, ttft_s=0.0, tbt_s=0.0)))[0] != "Latencies"
    steady = [outcome(index, predicted_ttft_s=0.0) for index in range(4)]
    assert headings(result("1", *steady), result("2", *steady)) == ["Latencies", COMPUTED]


def test_equal_results_give_equal_pages_also_from_the_json_beside_them(tmp_path: Path) -> None:
    """Pages do not depend on earlier drawings or on the duration of the simulation."""
    results = [made_up("x", rejects=True), made_up("y", rate=9.0)]
    path = write_page(results, tmp_path / "new" / "out")
    assert path == tmp_path / "new" / "out" / "index.html"
    stored = results_from_json((path.parent / "results.json").read_text())
    assert page(stored) == path.read_text("utf-8")
    assert page([replace(each, wall_s=99.0) for each in results]) == path.read_text("utf-8")


def test_without_matplotlib_there_are_tables_json_and_the_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    document = Document(write_page([made_up("m")], tmp_path).read_text(encoding="utf-8"))
    assert document.drawings == []
    for text in (document.text, capsys.readouterr().err):
        assert "need matplotlib, pip install 'moonserve[plots]'" in text
    assert results_from_json((tmp_path / "results.json").read_text())[0].name == "m"


def test_what_cannot_be_written_is_a_complaint_about_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results"):
        write_page([], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_page([result("r", outcome(0))], tmp_path / "file")


def test_a_curve_ends_below_the_whole_by_what_was_rejected_and_is_thinned_but_for_its_ends() -> None:
    x, y = plots.cumulative(np.array([1.0, 3.0]), 4)
    assert (x.tolist(), y.tolist()) == ([1, 1, 3], [0, 0.25, 0.5])
    x, y = plots.cumulative(np.arange(10_000.0), 20_000)
    assert (len(x), x[0], x[-1], y[-1]) == (plots.MAX_POINTS + 1, 0, 9_999, 0.5)
    assert x[1:] == pytest.approx(y[1:] * 20_000 - 1)


def test_loads_are_what_was_sampled_and_unknown_elsewhere() -> None:
    samples = [sample(0.0, "d-0", 3), sample(4.0, "d-0", 1), sample(1.0, "d-1", 2), sample(1.0, "e-0", 9, 7.5)]
    table, _ = plots.load_table(samples, ["d-0", "d-1"])
    assert table[0].tolist() == pytest.approx([4, math.nan, 2], nan_ok=True)
    assert table[1].tolist() == pytest.approx([math.nan, 3, math.nan], nan_ok=True)
    table, what = plots.load_table(samples, ["e-0"])
    assert (table[0][1], what) == (7.5, "predicted queue, s")
    names = ["prefill-10", "prefill-2", "decode-0", "7", "vllm"]
    kinds = {"prefill": ["prefill-2", "prefill-10"], "decode": ["decode-0"], "instances": ["7"], "vllm": ["vllm"]}
    assert plots.instances_by_kind([sample(0.0, name, 0) for name in names]) == kinds


def test_predictions_count_where_both_are_known() -> None:
    outcomes = [outcome(n, ttft_s=2.0, predicted_ttft_s=each) for n, each in enumerate((2.5, 1.4, 0.0, math.inf))]
    pairs = plots.pairs_of(result("p", *outcomes, rejected(4, predicted_ttft_s=9.0)))
    assert pairs.tolist() == [[2.0, 2.5], [2.0, 1.4]]
    assert plots.near_share(pairs) == 0.5


@pytest.mark.parametrize(
    ("write", "numbers", "texts"),
    [
        (format_tick, (0, 0.05, 30, 1500, 3e6, -2000), ["0", "0.05", "30", "1.5k", "3M", "-2k"]),
        (format_scaled, (0, 0.25, 99_999, 1.7e13, math.inf), ["0", "0.25", "99,999", "17 T", "–"]),
        (format_ms, (1.25, 1234.5, math.nan), ["1.2", "1,234", "–"]),
        (format_ms_as_seconds, (5, 12_345, math.nan), ["0.005", "12.35", "–"]),
    ],
)
def test_numbers_are_for_people(write: Callable[[float], str], numbers: tuple[float, ...], texts: list[str]) -> None:
    assert [write(number) for number in numbers] == texts
