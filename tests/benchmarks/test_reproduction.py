"""`benchmarks.reproduction`: the files that it writes, and the figures in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reproduction.__main__ import FIGURES, main
from tests.traces.made import write_sessions
from tests.traces.reports.document import Document

EASY = "table-2,figure-8,figure-9,figure-11,figure-14"


def reproduce(trace: Path, out: Path, *arguments: str) -> int:
    return main([str(trace), "--out", str(out), "--processes", "1", *arguments])


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())  # type: ignore[no-any-return]


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
    claims = [each["holds"] for figure in found["figures"] for each in figure["claims"]]
    assert f"{sum(claims)} of {len(claims)} claims" in text
    table, figure_8, *_ = found["figures"]
    plain = figure_8["rows"][0]
    assert (plain["published"], plain["ratio"]) == (1.56, pytest.approx(plain["ours"] / 1.56))
    rows = {row["what"]: row["ours"] for row in table["rows"]}
    assert (rows["conversation: requests"], rows["synthetic: requests"]) == (40, 7)
    assert "toolagent" in table["why"]
