"""Traces and options of the benchmarks that simulate clusters. Runs missing simulations, with progress on stderr."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from moonserve.__main__ import traces
from moonserve.traces.experiments.parallel_runs import Job, JobProgress, ResultArchive, TraceFile, run_missing
from moonserve.traces.simulator.results import SimulationResult

PUBLISHED = "conversation (published)"


def argument_parser(doc: str | None, output: str) -> argparse.ArgumentParser:
    """Returns a parser of the common options. `output`: default of --output."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="the conversation trace")
    parser.add_argument("--quick", action="store_true", help="the first requests of each trace only")
    parser.add_argument("--processes", type=int, default=2, help="simulations at once")
    parser.add_argument("--output", type=Path, default=Path(output))
    return parser


class Traces:
    """Files of the traces; creates synthetic ones on demand."""

    def __init__(self, published: Path, folder: Path) -> None:
        self._published = published
        self._folder = folder

    def file(self, name: str) -> TraceFile:
        if name == PUBLISHED:
            return TraceFile(path=self._published)
        preset, seed = name.split(" seed ")
        path = self._folder / f"{preset}-{seed}.jsonl"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            options = ["--preset", preset, "--seed", seed]
            if traces(["synthesize", "--out", str(path), *options]):
                raise SystemExit(1)
        return TraceFile(path=path)


def run_simulations(
    works: Iterable[Job], trace: TraceFile, folder: Path, num_processes: int
) -> Iterator[SimulationResult]:
    """Returns the result of each work. Results that `folder` already holds are not simulated again."""
    archive, wanted = ResultArchive.of(folder, trace), list(works)
    run_missing(wanted, trace, archive, num_processes=num_processes, tell=_report_progress)
    return map(archive.read, wanted)


def _report_progress(progress: JobProgress) -> None:
    text = f"{progress.num_done} of {progress.num_all}, {progress.left_s:.0f} s left"
    print(text, file=sys.stderr, flush=True)
