"""Many simulations: each is done once, found again by what it depends on, the same from any process."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.traces.simulator.small import BLOCK, MODEL, request
from traces.format import TraceRecord
from traces.simulator import many
from traces.simulator.many import Archive, Progress, Run, TraceFile, do_missing
from traces.simulator.run import simulate
from traces.simulator.spec import ClusterSpec, CoupledSpec

SPEC = ClusterSpec(
    model=replace(MODEL, device_tokens=50_000, dram_tokens=50_000),
    num_prefill=2,
    num_decode=1,
    block_size=512,
)
RUNS = [
    Run(spec=SPEC),
    Run(spec=SPEC, speedup=2.0),
    Run(spec=SPEC, num_outputs=1),
    Run(spec=SPEC, num_requests=3),
    Run(spec=replace(SPEC, policy="random")),
    Run(spec=CoupledSpec(model=SPEC.model, num_instances=3, block_size=512)),
]


@pytest.fixture
def trace(tmp_path: Path) -> TraceFile:
    """Eight requests; every second one begins as the first does."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 700 * number,
            "input_length": 1500,
            "output_length": 5,
            "hash_ids": [0, 1, number + 2] if number % 2 else [3 * number + 100 + i for i in range(3)],
        }
        for number in range(8)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return TraceFile(path=path)


def done(trace: TraceFile, folder: Path, runs: list[Run], num_processes: int = 1) -> list[Progress]:
    told: list[Progress] = []
    archive = Archive.of(folder, trace)
    do_missing(runs, trace, archive, num_processes=num_processes, tell=told.append)
    return told


def test_processes_keep_what_one_simulates(trace: TraceFile, tmp_path: Path) -> None:
    """Results from spawned processes are those of `simulate` here, whole."""
    told = done(trace, tmp_path / "runs", RUNS, num_processes=2)
    assert sorted(each.num_done for each in told) == [1, 2, 3, 4, 5, 6]
    assert told[-1].left_s == 0
    archive = Archive.of(tmp_path / "runs", trace)
    for run in RUNS:
        expected = simulate(run.spec, run.records(trace.records()))
        assert replace(archive.read(run), wall_s=0.0) == replace(expected, wall_s=0.0)


def test_nothing_is_done_twice(trace: TraceFile, tmp_path: Path) -> None:
    """Neither within one call nor in the next, in which only the new one is simulated."""
    folder = tmp_path / "runs"
    assert len(done(trace, folder, [RUNS[0], RUNS[0], RUNS[1]])) == 2
    assert done(trace, folder, [RUNS[1], RUNS[0]]) == []
    assert [each.work for each in done(trace, folder, RUNS[:3])] == [RUNS[2]]


def test_a_result_is_found_by_all_that_it_depends_on(trace: TraceFile, tmp_path: Path) -> None:
    """Another spec, speed, length or trace is another file; the same trace elsewhere is the same one."""
    archive = Archive.of(tmp_path / "runs", trace)
    assert len({archive.path(run) for run in RUNS}) == len(RUNS)
    moved = replace(trace, path=tmp_path / "moved.jsonl")
    moved.path.write_bytes(trace.path.read_bytes())
    cut = replace(trace, limit=2)
    assert Archive.of(tmp_path / "runs", moved).path(RUNS[0]) == archive.path(RUNS[0])
    assert Archive.of(tmp_path / "runs", cut).path(RUNS[0]) != archive.path(RUNS[0])


def test_a_broken_result_is_named(trace: TraceFile, tmp_path: Path) -> None:
    """Cut short, empty, or another program's: an error with the path, no traceback of gzip."""
    archive = Archive.of(tmp_path / "runs", trace)
    done(trace, tmp_path / "runs", [RUNS[0]])
    path = archive.path(RUNS[0])
    for content in (path.read_bytes()[:40], b"", gzip.compress(b"{}")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=path.name):
            archive.read(RUNS[0])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_result_that_cannot_be_written_is_told(num_processes: int, trace: TraceFile, tmp_path: Path) -> None:
    """From whichever process: a folder lies where it would; an error with the path, and nothing half written."""
    folder = tmp_path / "runs"
    blocked = Archive.of(folder, trace).path(RUNS[0])
    (blocked / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match=blocked.name):
        done(trace, folder, RUNS[:2], num_processes)
    assert all(path.name.endswith(".json.gz") for path in folder.iterdir())


def test_a_change_of_what_simulations_run_on_is_another_result(
    trace: TraceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes a policy simulates again."""
    (tmp_path / "kvstore").mkdir()
    archive = Archive.of(tmp_path / "runs", trace)
    paths = {archive.path(RUNS[0])}
    monkeypatch.setattr(many, "_ROOT", tmp_path)
    for version in ("1", "1", "2"):
        (tmp_path / "kvstore" / "policy.py").write_text(version)
        many.source_digest.cache_clear()
        paths.add(archive.path(RUNS[0]))
    many.source_digest.cache_clear()
    assert len(paths) == 3


def test_what_cannot_be_simulated_is_refused_before_anything_is(trace: TraceFile, tmp_path: Path) -> None:
    wrong = Run(spec=replace(SPEC, num_decode=0))
    with pytest.raises(ConfigError, match="--decode"):
        done(trace, tmp_path / "runs", [RUNS[0], wrong])
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_changes_the_trace_as_it_says() -> None:
    records: list[TraceRecord] = [request(float(n), 3 * BLOCK, 7) for n in range(4)]
    changed = Run(spec=SPEC, speedup=2.0, num_outputs=1, num_requests=3).records(records)
    assert [record.arrived_s for record in changed] == [0.0, 0.5, 1.0]
    assert [record.output_length for record in changed] == [1, 1, 1]
    assert Run(spec=SPEC).records(records) == records
