"""`python -m benchmarks.reproduction TRACE`: every published figure that a trace allows, as one page and as JSON.

Each simulation is kept in the folder's `runs/`, so that an interrupted run continues and a repeated one is quick.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pydantic_core

from benchmarks.reproduction import (
    arxiv_cache_policies_overload,
    figures_1_5_8,
    figures_13_14_15,
    table_2_figures_9_10_11,
)
from benchmarks.reproduction.published_figure import KINDS, Figure, FigureResult, Plot, PublicTrace, Row
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, run_command
from moonserve.protocol.process.progress_bars import ProgressBars
from moonserve.traces import plots
from moonserve.traces.experiments.parallel_runs import (
    INTERRUPTED,
    Job,
    JobProgress,
    ResultArchive,
    TraceFile,
    run_missing,
)
from moonserve.traces.format import TraceRecord
from moonserve.traces.output import NO_VALUE, write_text
from moonserve.traces.plots import Image
from moonserve.traces.simulation_report import NO_PLOTS, Table, templates

# Reproduced figures as one self-contained HTML page (page.html) and as JSON.
#
# Equal findings give equal pages and JSON, so dates and durations are left out.

REPRODUCTION_FORMAT = "moonserve reproduction 1"
_MAX_MARKERS = 15  # a line of at most this many points has markers


@dataclass(frozen=True, slots=True, kw_only=True)
class _FigureSection:
    """A figure as shown on the page."""

    figure: Figure
    missing: str
    rows: Table
    claims: Mapping[str, bool]
    images: Sequence[Image]
    why: str

    @property
    def holding(self) -> str:
        return f"{sum(self.claims.values())} of {len(self.claims)}" if self.claims else NO_VALUE


def figures_page(subject: PublicTrace, found: Sequence[tuple[Figure, FigureResult]], *, quick: bool) -> str:
    """Returns the HTML document. Without matplotlib it has no plots."""
    parts = [_section(subject, figure, finding) for figure, finding in found]
    template = templates(Path(__file__).parent).get_template("page.html")
    return template.render(subject=subject, quick=quick, parts=parts)


def _section(subject: PublicTrace, figure: Figure, finding: FigureResult) -> _FigureSection:
    return _FigureSection(
        figure=figure,
        missing=figure.missing(subject),
        rows=_table(finding.rows),
        claims=finding.claims,
        images=[_image(plot) for plot in finding.plots] if plots.has_matplotlib() else [],
        why=finding.why,
    )


def _table(rows: Sequence[Row]) -> Table:
    has_why = any(row.why for row in rows)
    columns = ("published", "ours", "ours ÷ published", *(("why",) if has_why else ()))
    return Table(columns, [(row.what, _cells(row)[: len(columns)]) for row in rows])


def _cells(row: Row) -> list[str]:
    ratio = NO_VALUE if row.ratio is None else f"{row.ratio:.2f}"
    return [_number(row.published, row.unit), _number(row.ours, row.unit), ratio, row.why]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return NO_VALUE
    if unit == "%":
        return f"{value:.1%}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f} {unit}".strip()
    return f"{value:.3g} {unit}".strip() if abs(value) < 1 else f"{value:.2f} {unit}".strip()


def _image(plot: Plot) -> Image:
    def draw(figure: Any) -> None:
        panel = figure.add_subplot(xlabel=plot.x_label, ylabel=plot.y_label)
        has_points = any(line.points for line in plot.lines)
        if plot.log_x and has_points:
            panel.set_xscale("log")
        if plot.log_y and has_points:
            panel.set_yscale("log")
        marker = "o" if max(len(line.points) for line in plot.lines) <= _MAX_MARKERS else ""
        for index, line in enumerate(plot.lines):
            xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
            if line.is_published:
                panel.plot(xs, ys, "D", color=f"C{index}", label=line.label, zorder=3)
            else:
                style = plots.line_style(index)
                panel.plot(xs, ys, marker=marker, markersize=4, label=line.label, **style)
        if not plot.log_y:
            panel.set_ylim(bottom=0)
        plots.label_axes(panel, percent_y=plot.y_unit == "%")
        plots.legend(figure)

    return plots.draw_image(plot.title, draw)


def to_json(subject: PublicTrace, found: Sequence[tuple[Figure, FigureResult]], *, quick: bool) -> str:
    """Returns the content of the page as JSON. NaN and infinity become null."""
    whole = {
        "format": REPRODUCTION_FORMAT,
        "trace": subject.name,
        "num_requests": len(subject.records),
        "quick": quick,
        "figures": [
            {
                "name": figure.name,
                "title": figure.title,
                "setting": figure.setting,
                "missing": figure.missing(subject),
                "rows": [{**asdict(row), "ratio": row.ratio} for row in finding.rows],
                "claims": [{"text": text, "holds": holds} for text, holds in finding.claims.items()],
                "why": finding.why,
                "plots": finding.plots,
            }
            for figure, finding in found
        ],
    }
    return pydantic_core.to_json(whole, indent=2, inf_nan_mode="null").decode() + "\n"


FIGURES: tuple[Figure, ...] = (
    table_2_figures_9_10_11.TABLE_2,
    figures_1_5_8.FIGURE_1,
    figures_1_5_8.FIGURE_5,
    figures_1_5_8.FIGURE_8,
    table_2_figures_9_10_11.FIGURE_9,
    table_2_figures_9_10_11.FIGURE_10,
    table_2_figures_9_10_11.FIGURE_11,
    figures_13_14_15.FIGURE_13,
    figures_13_14_15.FIGURE_14,
    figures_13_14_15.FIGURE_15,
    arxiv_cache_policies_overload.CACHE_POLICIES,
    arxiv_cache_policies_overload.OVERLOAD,
)


PROG = "python -m benchmarks.reproduction"
PAGE, RESULTS, RUNS = "index.html", "results.json", "runs"
_QUICK = 10  # one of this many requests


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Options of the command."""

    trace: str = option(help="trace file, JSON lines; also as the first argument")
    out: str = option("out/reproduce", help="folder for index.html, results.json and the runs")
    only: tuple[str, ...] = option((), help=f"these figures, commas between: {', '.join(f.name for f in FIGURES)}")
    quick: bool = option(False, help="only the first tenth of the trace: minutes less, other numbers")
    processes: int = option(2, help="simulations at once")


def main(argv: Sequence[str]) -> int:
    """Runs the command. The first argument may be the trace."""
    return run_command(ReproduceConfig, run, argv, prog=PROG, positional="--trace", interrupted=INTERRUPTED)


def run(config: ReproduceConfig) -> int:
    """Reproduces figures and writes the page. Raises ConfigError before any simulation, except if the disk is full."""
    if config.processes < 1:
        raise ConfigError("--processes must be at least 1")
    figures = _chosen(config.only)
    trace, subject = _public_trace(Path(config.trace), quick=config.quick)
    folder = Path(config.out)
    archive = ResultArchive.of(folder / RUNS, trace)
    wanted = {figure.name: figure.runs(subject) for figure in figures}
    did = _simulate(wanted, trace, archive, config.processes)
    found = []
    for figure in figures:
        results = {name: archive.read(work) for name, work in wanted[figure.name].items()}
        found.append((figure, figure.evaluate(subject, results)))
    write_text(folder / RESULTS, to_json(subject, found, quick=config.quick))
    write_text(folder / PAGE, figures_page(subject, found, quick=config.quick))
    if not plots.has_matplotlib():
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


def _public_trace(path: Path, *, quick: bool) -> tuple[TraceFile, PublicTrace]:
    """Reads the trace. Raises ConfigError that explains how to download one if it is missing."""
    if not path.exists():
        raise ConfigError(
            f"there is no trace {path}; moonserve traces fetch --into traces-data downloads the public ones, then"
            f" {PROG} traces-data/conversation_trace.jsonl (make reproduce TRACE=…)"
        )
    whole = TraceFile(path=path).records()
    limit = max(len(whole) // _QUICK, 1) if quick else None
    beside = {} if quick else _other_traces(path)
    kind = None if quick else _kind(path)  # no published figure is of a tenth
    subject = PublicTrace(name=path.name, kind=kind, records=whole[:limit], others=beside)
    return TraceFile(path=path, limit=limit), subject


def _kind(path: Path) -> str | None:
    return next((kind for kind in KINDS if path.name.startswith(kind)), None)


def _other_traces(path: Path) -> Mapping[str, Sequence[TraceRecord]]:
    """Returns the other public traces in the same folder, by kind."""
    others = {kind: path.with_name(f"{kind}_trace.jsonl") for kind in KINDS}
    return {
        kind: TraceFile(path=other).records()
        for kind, other in others.items()
        if kind != _kind(path) and other.exists()
    }


def _simulate(wanted: Mapping[str, Mapping[str, Job]], trace: TraceFile, archive: ResultArchive, processes: int) -> int:
    """Runs the missing simulations and returns their number. One that several figures share counts once."""
    names: dict[Job, str] = {}
    for figure, works in wanted.items():
        for name, work in works.items():
            names.setdefault(work, f"{figure}, {name}")
    done = 0

    def tell(progress: JobProgress) -> None:
        nonlocal done
        done = progress.num_done
        print(
            f"[{progress.num_done}/{progress.num_all}] {names[progress.work]}: {progress.took_s:.1f} s;"
            f" about {_duration(progress.left_s)} left",
            flush=True,
        )
        text = f"{progress.num_done} of {progress.num_all}"
        shown.show("simulations", progress.share_done, 1.0, text, progress.left_s)

    with ProgressBars(lines=False) as shown, shown.busy("simulating"):
        run_missing(names, trace, archive, num_processes=processes, tell=tell)
    return done


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _conclude(found: Sequence[tuple[Figure, FigureResult]], num_simulated: int) -> None:
    claims = [(figure, *claim) for figure, finding in found for claim in finding.claims.items()]
    failed = [f"{figure.title}: {text}" for figure, text, holds in claims if not holds]
    held = len(claims) - len(failed)
    print(f"{num_simulated} simulated now; {held} of {len(claims)} claims hold")
    for text in failed:
        print(f"does not hold: {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
