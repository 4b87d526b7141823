"""`moonserve simulate`: a table, and a folder that can be read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deploy.cli import main
from protocol.errors import ConfigError
from tests.traces.made import write_sessions
from traces.reports.saved import results_from_json
from traces.simulator.command import SimulateConfig, parse_fault, specs_of
from traces.simulator.profiles import LLAMA3_70B_8XA800, write_profile
from traces.simulator.spec import Fault


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_sessions(tmp_path / "trace.jsonl", 20))


def test_several_runs_are_one_table_and_one_folder(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two policies and a baseline; the JSON holds all that happened and is the same when it is done again."""
    arguments = ["--prefill", "2", "--decode", "1", "--policy", "random,global-cache-aware", "--coupled", "plain"]
    stored = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert main(["simulate", trace, *arguments, "--report", str(folder)]) == 0
        results = results_from_json((folder / "results.json").read_text())
        stored.append([replace(each, wall_s=0.0) for each in results])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("random", "global-cache-aware", "coupled plain"))
    assert stored[0] == stored[1]
    assert [len(each.outcomes) for each in stored[0]] == [20, 20, 20]
    _, aware, plain = (sum(outcome.cached_tokens for outcome in each.outcomes) for each in stored[0])
    assert aware > 0 == plain


def test_fixed_and_changing_roles_stand_side_by_side(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    fixed, changing = ["global-cache-aware"], ["global-cache-aware +roles"]
    for choice, names in {"off": fixed, "on": changing, "both": fixed + changing}.items():
        assert main(["simulate", trace, "--role-switching", choice]) == 0
        _, *rows = capsys.readouterr().out.strip().splitlines()
        assert [row.split("  ")[0] for row in rows] == names


def test_a_measured_profile_and_changes_to_it_are_used(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(replace(LLAMA3_70B_8XA800, name="measured", dram_tokens=500_000), profile)
    config = SimulateConfig(trace="t", model_profile=str(profile))
    for changed, dram_tokens in ((config, 500_000), (replace(config, dram_tokens=5120), 5120)):
        ((_, spec),) = specs_of(changed)
        assert (spec.model.name, spec.model.dram_tokens) == ("measured", dram_tokens)


def test_faults_are_written_as_instance_and_times() -> None:
    assert parse_fault("prefill-3@600") == Fault(instance="prefill-3", at_s=600.0)
    expected = Fault(instance="decode-0", at_s=1.5, for_s=60.0, silent=True)
    assert parse_fault("decode-0@1.5+60:silent") == expected
    with pytest.raises(ConfigError, match="prefill-3@600"):
        parse_fault("decode-0@soon")
