"""`moonserve plan`: a table, JSON, and command lines that give the plan's own figures; clear words for bad input."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.config import ServeConfig
from protocol.config import load
from tests.traces.made import write_sessions
from traces.reports.saved import results_from_json
from traces.reports.summary import summary


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sessions(tmp_path_factory.mktemp("trace") / "trace.jsonl", 40)


def planned(trace: Path, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    arguments = ("--nodes", "4", "--processes", "1", "--out", str(out), *arguments)
    code = main(["plan", str(trace), *arguments])
    return code, json.loads((out / "plan.json").read_text())


def test_the_command_line_gives_the_figures_of_the_plan(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed `moonserve simulate …` is run, and its result is the plan's smallest cluster."""
    code, found = planned(trace, tmp_path / "plan", "--slo-tbt", "0.2", "--speedup", "2")
    assert code == 0
    assert found["simulate"] in capsys.readouterr().out
    program, *arguments = shlex.split(found["simulate"])
    assert program == "moonserve"
    assert main([*arguments, "--report", str(tmp_path / "report")]) == 0
    (result,) = results_from_json((tmp_path / "report" / "results.json").read_text())
    figures = summary(result)
    assert found["smallest"]["effective"] == figures["effective_fraction"]
    assert found["smallest"]["mean_ttft_ms"] == figures["mean_ttft_ms"]
    assert found["smallest"]["goodput"] == figures["request_goodput"]


def test_the_hint_to_serve_is_understood(trace: Path, tmp_path: Path) -> None:
    """`moonserve serve` takes every word of it."""
    _, found = planned(trace, tmp_path, "--slo-ttft", "20")
    words = shlex.split(found["serve"])
    assert words[:3] == ["moonserve", "serve", "MODEL"]
    served = load(ServeConfig, words[3:], prog="moonserve serve", environ={})
    smallest = found["smallest"]
    assert (served.prefill_workers, served.decode_workers) == (
        smallest["num_prefill"],
        smallest["num_decode"],
    )
    assert served.ttft_slo == 20.0
    assert served.placement_policy == smallest["policy"]


def test_a_second_time_it_says_the_same_without_simulating(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, first = planned(trace, tmp_path)
    before = capsys.readouterr()
    assert "effective (" in before.err
    _, second = planned(trace, tmp_path)
    after = capsys.readouterr()
    assert first == second
    assert before.out == after.out
    assert "effective (" not in after.err


def test_too_few_machines_are_told_with_what_they_reach(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1, for scripts; the best there is stays in the answer."""
    code, found = planned(trace, tmp_path, "--slo-ttft", "0.001")
    assert code == 1
    assert found["smallest"] is None
    assert found["best"]["effective"] == 0
    assert "try more --nodes" in capsys.readouterr().out
