"""Tests of the archive of runs: each is simulated once, stored under its inputs, and equal from any process."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moonserve.protocol.errors import ConfigError
from moonserve.traces.experiments import parallel_runs
from moonserve.traces.experiments.parallel_runs import ClusterRun, JobProgress, ResultArchive, TraceFile, run_missing
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.spec import ClusterSpec, CoupledSpec
from tests.traces.made import write_sessions
from tests.traces.simulator.small import BLOCK, MODEL, request

LARGE = replace(MODEL, device_tokens=50_000, dram_tokens=50_000, max_model_len=50_000)
SPEC = ClusterSpec(model=LARGE, num_prefill=2, num_decode=1, block_size=512)
RUNS = [
    ClusterRun(spec=SPEC),
    ClusterRun(spec=SPEC, speedup=2.0),
    ClusterRun(spec=SPEC, num_outputs=1),
    ClusterRun(spec=SPEC, num_requests=3),
    ClusterRun(spec=replace(SPEC, policy="random")),
    ClusterRun(spec=CoupledSpec(model=LARGE, num_instances=3, block_size=512)),
]
Do = Callable[..., list[JobProgress]]


@pytest.fixture
def trace(tmp_path: Path) -> TraceFile:
    return TraceFile(path=write_sessions(tmp_path / "trace.jsonl", 8))


@pytest.fixture
def archive(trace: TraceFile, tmp_path: Path) -> ResultArchive:
    return ResultArchive.of(tmp_path / "runs", trace)


@pytest.fixture
def do(trace: TraceFile, archive: ResultArchive) -> Do:
    def done(runs: list[ClusterRun], num_processes: int = 1) -> list[JobProgress]:
        told: list[JobProgress] = []
        run_missing(runs, trace, archive, num_processes=num_processes, tell=told.append)
        return told

    return done


def test_processes_keep_what_one_simulates(trace: TraceFile, archive: ResultArchive, do: Do) -> None:
    """Complete results from spawned processes equal those of `simulate` in this process."""
    told = do(RUNS, num_processes=2)
    assert sorted(each.num_done for each in told) == [1, 2, 3, 4, 5, 6]
    assert told[-1].left_s == 0
    for run in RUNS:
        expected = simulate(run.spec, run.records(trace.records()))
        assert replace(archive.read(run), wall_s=0.0) == replace(expected, wall_s=0.0)


def test_nothing_is_done_twice(do: Do) -> None:
    """A run is not repeated within one call; the next call simulates only the new run."""
    assert len(do([RUNS[0], RUNS[0], RUNS[1]])) == 2
    assert [each.work for each in do(RUNS[:3])] == [RUNS[2]]


def test_a_result_is_found_by_all_that_it_depends_on(
    trace: TraceFile, archive: ResultArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result's path changes with the spec, speed, length, trace or source code, not with the trace's location."""
    assert len({archive.path(run) for run in RUNS}) == len(RUNS)
    moved = replace(trace, path=tmp_path / "moved.jsonl")
    moved.path.write_bytes(trace.path.read_bytes())
    cut = replace(trace, limit=2)
    assert ResultArchive.of(tmp_path / "runs", moved).path(RUNS[0]) == archive.path(RUNS[0])
    assert ResultArchive.of(tmp_path / "runs", cut).path(RUNS[0]) != archive.path(RUNS[0])
    (tmp_path / "kvstore").mkdir()
    paths = {archive.path(RUNS[0])}
    monkeypatch.setattr(parallel_runs, "_ROOT", tmp_path)
    for version in ("1", "1", "2"):
        (tmp_path / "kvstore" / "policy.py").write_text(version)
        parallel_runs.source_digest.cache_clear()
        paths.add(archive.path(RUNS[0]))
    parallel_runs.source_digest.cache_clear()
    assert len(paths) == 3


def test_a_broken_result_is_named(archive: ResultArchive, do: Do) -> None:
    """A truncated, empty or foreign file raises a ConfigError that names it, not an error of gzip."""
    do(RUNS[:1])
    path = archive.path(RUNS[0])
    for content in (path.read_bytes()[:40], b"", gzip.compress(b"{}")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=path.name):
            archive.read(RUNS[0])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_unwritable_result_is_reported(num_processes: int, archive: ResultArchive, do: Do) -> None:
    """If a folder blocks a result's path, any process reports a ConfigError that names it; no partial file remains."""
    blocked = archive.path(RUNS[0])
    (blocked / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match=blocked.name):
        do(RUNS[:2], num_processes)
    assert all(path.name.endswith(".json.gz") for path in blocked.parent.iterdir())


def test_invalid_jobs_are_refused_before_any_simulation(do: Do, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--decode"):
        do([RUNS[0], ClusterRun(spec=replace(SPEC, num_decode=0))])
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_changes_the_trace_as_it_says() -> None:
    records = [request(float(n), 3 * BLOCK, 7) for n in range(4)]
    changed = ClusterRun(spec=SPEC, speedup=2.0, num_outputs=1, num_requests=3).records(records)
    assert [(record.arrived_s, record.output_length) for record in changed] == [(0.0, 1), (0.5, 1), (1.0, 1)]
    assert ClusterRun(spec=SPEC).records(records) == records
