"""`moonserve reproduce`: every published figure that a trace allows, as one page and as JSON.

Each simulation is kept in the folder's `runs/`, so that an interrupted run continues and a repeated one is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from protocol.config import option, run_command
from protocol.errors import ConfigError
from protocol.progress import Progress as Shown
from traces.format import TraceRecord
from traces.output import write_text
from traces.reports import drawing
from traces.reports.page import NO_PLOTS
from traces.reproduction import (
    cache_policies,
    figure_1,
    figure_5,
    figure_8,
    figure_9,
    figure_10,
    figure_11,
    figure_13,
    figure_14,
    figure_15,
    overload,
    table_2,
)
from traces.reproduction.figure import KINDS, Figure, Finding, Subject
from traces.reproduction.page import page, to_json
from traces.simulator.many import INTERRUPTED, Archive, Progress, TraceFile, Work, do_missing

FIGURES: tuple[Figure, ...] = (
    table_2.FIGURE,
    figure_1.FIGURE,
    figure_5.FIGURE,
    figure_8.FIGURE,
    figure_9.FIGURE,
    figure_10.FIGURE,
    figure_11.FIGURE,
    figure_13.FIGURE,
    figure_14.FIGURE,
    figure_15.FIGURE,
    cache_policies.FIGURE,
    overload.FIGURE,
)


PROG = "moonserve reproduce"
PAGE, RESULTS, RUNS = "index.html", "results.json", "runs"
_QUICK = 10  # one of this many requests


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Options of `moonserve reproduce`."""

    trace: str = option(help="trace file, JSON lines; also as the first argument")
    out: str = option("out/reproduce", help="folder for index.html, results.json and the runs")
    only: tuple[str, ...] = option((), help=f"these figures, commas between: {', '.join(f.name for f in FIGURES)}")
    quick: bool = option(False, help="only the first tenth of the trace: minutes less, other numbers")
    processes: int = option(2, help="simulations at once")


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, the arguments after `reproduce`. The first one may be the trace."""
    return run_command(ReproduceConfig, run, argv, prog=PROG, positional="--trace", interrupted=INTERRUPTED)


def run(config: ReproduceConfig) -> int:
    """Reproduces figures and writes the page. Raises ConfigError before any simulation, except if the disk is full."""
    if config.processes < 1:
        raise ConfigError("--processes must be at least 1")
    figures = _chosen(config.only)
    trace, subject = _subject(Path(config.trace), quick=config.quick)
    folder = Path(config.out)
    archive = Archive.of(folder / RUNS, trace)
    wanted = {figure.name: figure.runs(subject) for figure in figures}
    did = _simulate(wanted, trace, archive, config.processes)
    found = []
    for figure in figures:
        results = {name: archive.read(work) for name, work in wanted[figure.name].items()}
        found.append((figure, figure.finding(subject, results)))
    write_text(folder / RESULTS, to_json(subject, found, quick=config.quick))
    write_text(folder / PAGE, page(subject, found, quick=config.quick))
    if not drawing.is_available():
        print(NO_PLOTS, file=sys.stderr)
    _conclude(found, did)
    print(folder / PAGE)
    return 0


def _chosen(names: Sequence[str]) -> list[Figure]:
    known = {figure.name: figure for figure in FIGURES}
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(known)}"
            raise ConfigError(f"--only {name}: no such figure; {hint}")
    return [figure for figure in FIGURES if not names or figure.name in names]


def _subject(path: Path, *, quick: bool) -> tuple[TraceFile, Subject]:
    """Reads the trace. Raises ConfigError that explains how to download one if it is missing."""
    if not path.exists():
        raise ConfigError(
            f"there is no trace {path}; moonserve traces fetch --into traces-data downloads the public ones, then"
            f" {PROG} traces-data/conversation_trace.jsonl (make reproduce TRACE=…)"
        )
    whole = TraceFile(path=path).records()
    limit = max(len(whole) // _QUICK, 1) if quick else None
    beside = {} if quick else _beside(path)
    kind = None if quick else _kind(path)  # no published figure is of a tenth
    subject = Subject(name=path.name, kind=kind, records=whole[:limit], beside=beside)
    return TraceFile(path=path, limit=limit), subject


def _kind(path: Path) -> str | None:
    return next((kind for kind in KINDS if path.name.startswith(kind)), None)


def _beside(path: Path) -> Mapping[str, Sequence[TraceRecord]]:
    """Returns the other public traces in the same folder, by kind."""
    others = {kind: path.with_name(f"{kind}_trace.jsonl") for kind in KINDS}
    return {
        kind: TraceFile(path=other).records()
        for kind, other in others.items()
        if kind != _kind(path) and other.exists()
    }


def _simulate(wanted: Mapping[str, Mapping[str, Work]], trace: TraceFile, archive: Archive, processes: int) -> int:
    """Runs the missing simulations and returns their number. One that several figures share counts once."""
    names: dict[Work, str] = {}
    for figure, works in wanted.items():
        for name, work in works.items():
            names.setdefault(work, f"{figure}, {name}")
    done = 0

    def tell(progress: Progress) -> None:
        nonlocal done
        done = progress.num_done
        print(
            f"[{progress.num_done}/{progress.num_all}] {names[progress.work]}: {progress.took_s:.1f} s;"
            f" about {_duration(progress.left_s)} left",
            flush=True,
        )
        text = f"{progress.num_done} of {progress.num_all}"
        shown.show("simulations", progress.num_done, progress.num_all, text)

    with Shown(lines=False) as shown, shown.busy("simulating"):
        do_missing(names, trace, archive, num_processes=processes, tell=tell)
    return done


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _conclude(found: Sequence[tuple[Figure, Finding]], num_simulated: int) -> None:
    claims = [(figure, *claim) for figure, finding in found for claim in finding.claims.items()]
    failed = [f"{figure.title}: {text}" for figure, text, holds in claims if not holds]
    held = len(claims) - len(failed)
    print(f"{num_simulated} simulated now; {held} of {len(claims)} claims hold")
    for text in failed:
        print(f"does not hold: {text}")
