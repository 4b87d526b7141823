"""Runs the missing simulations of a benchmark, and reports progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from traces.simulator.many import Archive, Progress, TraceFile, Work, do_missing
from traces.simulator.results import SimulationResult


def simulated(works: Iterable[Work], trace: TraceFile, folder: Path, num_processes: int) -> Iterator[SimulationResult]:
    """Returns the result of each work. Results that `folder` already holds are not simulated again."""
    archive, wanted = Archive.of(folder, trace), list(works)
    do_missing(wanted, trace, archive, num_processes=num_processes, tell=_tell)
    return map(archive.read, wanted)


def _tell(progress: Progress) -> None:
    text = f"{progress.num_done} of {progress.num_all}, {progress.left_s:.0f} s left"
    print(text, file=sys.stderr, flush=True)
