"""Tests of `moonserve simulate`: its table, its report folder, and the model profile files that it reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonserve.protocol.errors import ConfigError
from moonserve.traces.experiments.simulate import SimulateConfig, parse_fault, specs_of
from moonserve.traces.format import read_trace
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.model_profiles import FORMAT, LLAMA3_70B_8XA800, PROFILES, read_profile, write_profile
from moonserve.traces.simulator.results import results_from_json
from moonserve.traces.simulator.spec import ClusterSpec, Crowding, Fault, Overheads
from tests.commands import Command
from tests.traces.made import write_sessions


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_sessions(tmp_path / "trace.jsonl", 20))


def test_many_runs_are_one_table_and_one_folder(trace: str, tmp_path: Path, moonserve: Command) -> None:
    """With two policies and a baseline, the JSON holds every outcome, and a second run gives the same results."""
    arguments = ["--prefill", "2", "--decode", "1", "--policy", "random,global-cache-aware", "--coupled", "plain"]
    stored = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        printed = moonserve("simulate", trace, *arguments, "--report", str(folder), ends=0).out
        assert all(name in printed for name in ("random", "global-cache-aware", "coupled plain"))
        results = results_from_json((folder / "results.json").read_text())
        stored.append([replace(each, wall_s=0.0) for each in results])
    assert stored[0] == stored[1]
    assert [len(each.outcomes) for each in stored[0]] == [20, 20, 20]
    _, aware, plain = (sum(outcome.cached_tokens for outcome in each.outcomes) for each in stored[0])
    assert aware > 0 == plain


def test_progress_counts_requests_that_ended(tmp_path: Path) -> None:
    """It never falls, never passes the number of requests, and changes no result."""
    records, seen = read_trace(write_sessions(tmp_path / "long.jsonl", 400)), [0]
    spec = ClusterSpec(model=LLAMA3_70B_8XA800, num_prefill=1, num_decode=1)
    told = simulate(spec, records, progress=seen.append)
    assert seen == sorted(seen)
    assert 0 < seen[-1] <= len(records)
    assert replace(told, wall_s=0.0) == replace(simulate(spec, records), wall_s=0.0)


def test_fixed_and_changing_roles_stand_side_by_side(trace: str, moonserve: Command) -> None:
    fixed, changing = ["global-cache-aware"], ["global-cache-aware +roles"]
    for choice, names in {"off": fixed, "on": changing, "both": fixed + changing}.items():
        _, *rows = moonserve("simulate", trace, "--role-switching", choice, ends=0).lines
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


_ANY = next(iter(PROFILES.values()))


def written(folder: Path, **changes: Any) -> Path:
    """Writes a valid profile file with some fields changed; None leaves a field out."""
    path = folder / "profile.json"
    write_profile(_ANY, path, measured={"points": [1, 2]})
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return path


def test_what_is_written_is_read_back_and_defaults_may_be_left_out(tmp_path: Path) -> None:
    """Overheads and crowding are read back too. A pool may be empty, and a rate may be an integer."""
    profile = replace(
        _ANY,
        dram_tokens=0,
        overheads=Overheads(request_s=0.01, handoff_s=0.002),
        crowding=Crowding(prefill=(1.0, 1.25), decode=(1.0,), gaps=((1.0,), (0.0, 2.0))),
    )
    write_profile(profile, tmp_path / "profile.json", measured={"clock": "cpu"})
    assert read_profile(tmp_path / "profile.json") == profile
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    path = written(tmp_path, disk_tokens=None, max_num_seqs=None, nic_bytes_per_s=10**9)
    assert read_profile(path) == replace(_ANY, max_num_seqs=256, nic_bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, FORMAT),
        ({"nic_bytes_per_s": None, "prefill": None}, "prefill: Field required; nic_bytes_per_s: "),
        ({"dram_token": 5}, "dram_token: "),
        ({"nic_bytes_per_s": 0}, "nic_bytes_per_s: Input should be greater than 0"),
        ({"nic_bytes_per_s": "1"}, "nic_bytes_per_s: "),
        ({"nic_bytes_per_s": float("nan")}, "nic_bytes_per_s: "),
        ({"disk_bytes_per_s": float("inf")}, "disk_bytes_per_s: "),
        ({"device_tokens": 1.5}, "device_tokens: "),
        ({"dram_tokens": -1}, "dram_tokens: "),
        ({"name": ""}, "name: "),
        ({"prefill": {"c0": 1}}, "prefill.c1: Field required"),
        ({"decode": {"c0": -1, "c1": 0, "c2": 1}}, "profile coefficients must be"),
        ({"decode": {"c0": 0, "c1": 0, "c2": 0}}, "must be above 0"),
        ({"overheads": {"reply_s": 1}}, "overheads.reply_s: "),
        ({"overheads": {"landing_s": -1}}, "overheads.landing_s: "),
        ({"crowding": {"prefill": [1, 0]}}, "crowding.prefill.1: "),
        ({"crowding": {"gaps": [1]}}, "crowding.gaps.0: "),
    ],
)
def test_profile_errors_name_the_file(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_files_that_are_no_profile_or_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for content in ("", "{", "[]", "\x00"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"profile\.json"):
            read_profile(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_profile(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot write"):
        write_profile(_ANY, tmp_path / "absent" / "profile.json")
