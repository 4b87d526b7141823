"""Tests of the archive of runs: each is simulated once, stored under its inputs, and equal from any process."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.traces.made import write_sessions
from tests.traces.simulator.small import BLOCK, MODEL, request
from traces.simulator import many
from traces.simulator.many import Archive, Progress, Run, TraceFile, do_missing
from traces.simulator.run import simulate
from traces.simulator.spec import ClusterSpec, CoupledSpec

LARGE = replace(MODEL, device_tokens=50_000, dram_tokens=50_000, max_model_len=50_000)
SPEC = ClusterSpec(model=LARGE, num_prefill=2, num_decode=1, block_size=512)
RUNS = [
    Run(spec=SPEC),
    Run(spec=SPEC, speedup=2.0),
    Run(spec=SPEC, num_outputs=1),
    Run(spec=SPEC, num_requests=3),
    Run(spec=replace(SPEC, policy="random")),
    Run(spec=CoupledSpec(model=LARGE, num_instances=3, block_size=512)),
]
Do = Callable[..., list[Progress]]


@pytest.fixture
def trace(tmp_path: Path) -> TraceFile:
    return TraceFile(path=write_sessions(tmp_path / "trace.jsonl", 8))


@pytest.fixture
def archive(trace: TraceFile, tmp_path: Path) -> Archive:
    return Archive.of(tmp_path / "runs", trace)


@pytest.fixture
def do(trace: TraceFile, archive: Archive) -> Do:
    def done(runs: list[Run], num_processes: int = 1) -> list[Progress]:
        told: list[Progress] = []
        do_missing(runs, trace, archive, num_processes=num_processes, tell=told.append)
        return told

    return done


def test_processes_keep_what_one_simulates(trace: TraceFile, archive: Archive, do: Do) -> None:
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
    trace: TraceFile, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result's path changes with the spec, speed, length, trace or source code, not with the trace's location."""
    assert len({archive.path(run) for run in RUNS}) == len(RUNS)
    moved = replace(trace, path=tmp_path / "moved.jsonl")
    moved.path.write_bytes(trace.path.read_bytes())
    cut = replace(trace, limit=2)
    assert Archive.of(tmp_path / "runs", moved).path(RUNS[0]) == archive.path(RUNS[0])
    assert Archive.of(tmp_path / "runs", cut).path(RUNS[0]) != archive.path(RUNS[0])
    (tmp_path / "kvstore").mkdir()
    paths = {archive.path(RUNS[0])}
    monkeypatch.setattr(many, "_ROOT", tmp_path)
    for version in ("1", "1", "2"):
        (tmp_path / "kvstore" / "policy.py").write_text(version)
        many.source_digest.cache_clear()
        paths.add(archive.path(RUNS[0]))
    many.source_digest.cache_clear()
    assert len(paths) == 3


def test_a_broken_result_is_named(archive: Archive, do: Do) -> None:
    """A truncated, empty or foreign file raises a ConfigError that names it, not an error of gzip."""
    do(RUNS[:1])
    path = archive.path(RUNS[0])
    for content in (path.read_bytes()[:40], b"", gzip.compress(b"{}")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=path.name):
            archive.read(RUNS[0])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_result_that_cannot_be_written_is_told(num_processes: int, archive: Archive, do: Do) -> None:
    """If a folder blocks a result's path, any process reports a ConfigError that names it; no partial file remains."""
    blocked = archive.path(RUNS[0])
    (blocked / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match=blocked.name):
        do(RUNS[:2], num_processes)
    assert all(path.name.endswith(".json.gz") for path in blocked.parent.iterdir())


def test_what_cannot_be_simulated_is_refused_before_anything_is(do: Do, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--decode"):
        do([RUNS[0], Run(spec=replace(SPEC, num_decode=0))])
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_changes_the_trace_as_it_says() -> None:
    records = [request(float(n), 3 * BLOCK, 7) for n in range(4)]
    changed = Run(spec=SPEC, speedup=2.0, num_outputs=1, num_requests=3).records(records)
    assert [(record.arrived_s, record.output_length) for record in changed] == [(0.0, 1), (0.5, 1), (1.0, 1)]
    assert Run(spec=SPEC).records(records) == records
