"""`moonserve plan`: a table, JSON, and command lines that give the plan's own figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.config import ServeConfig
from protocol.config import load
from tests.traces.made import write_sessions
from traces.reports.saved import results_from_json
from traces.reports.summary import summary

Plan = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Plans for a small trace; exit code and plan.json."""
    trace = write_sessions(tmp_path / "trace.jsonl")

    def planned(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["plan", str(trace), "--nodes", "4", "--processes", "1", "--out", str(tmp_path), *arguments])
        return code, json.loads((tmp_path / "plan.json").read_text())

    return planned


def test_its_command_lines_give_its_figures_and_a_second_time_it_says_the_same_without_simulating(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed `moonserve simulate …` is run, and its result is the plan's smallest cluster; `moonserve serve` takes
    every word of the hint to it."""
    options = ("--slo-tbt", "0.2", "--slo-ttft", "20", "--speedup", "2")
    code, found = plan(*options)
    told = capsys.readouterr()
    assert code == 0
    smallest = found["smallest"]
    assert found["simulate"] in told.out
    program, *arguments = shlex.split(found["simulate"])
    assert program == "moonserve"
    assert main([*arguments, "--report", str(tmp_path / "report")]) == 0
    (result,) = results_from_json((tmp_path / "report" / "results.json").read_text())
    figures = summary(result)
    names = {"effective": "effective_fraction", "mean_ttft_ms": "mean_ttft_ms", "goodput": "request_goodput"}
    assert {name: smallest[name] for name in names} == {name: figures[other] for name, other in names.items()}

    words = shlex.split(found["serve"])
    assert words[:3] == ["moonserve", "serve", "MODEL"]
    served = load(ServeConfig, words[3:], prog="moonserve serve", environ={})
    assert (served.prefill_workers, served.decode_workers) == (smallest["num_prefill"], smallest["num_decode"])
    assert (served.ttft_slo, served.placement_policy) == (20.0, smallest["policy"])

    capsys.readouterr()
    assert plan(*options) == (0, found)
    again = capsys.readouterr()
    assert again.out == told.out
    assert ("effective (" in told.err, "effective (" in again.err) == (True, False)


def test_too_few_machines_are_told_with_what_they_reach(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, for scripts; the best there is stays in the answer."""
    code, found = plan("--slo-ttft", "0.001")
    assert code == 1
    assert found["smallest"] is None
    assert found["best"]["effective"] == 0
    assert "try more --nodes" in capsys.readouterr().out
