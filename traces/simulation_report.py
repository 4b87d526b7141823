"""Results as one self-contained HTML page. Equal results give equal pages, so durations of simulations are left out.
Texts are in `simulation.html`, the style in `base.html`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from moonserve.protocol.errors import ConfigError
from moonserve.traces import plots
from moonserve.traces.output import NO_VALUE, format_ms_as_seconds, format_scaled, format_tick, write_text
from moonserve.traces.plots import NumberedResult, number_results
from moonserve.traces.simulator.results import SUMMARY_COLUMNS, SimulationResult, results_to_json, summary_cells

PAGE = "index.html"
RESULTS = "results.json"
NO_PLOTS = "the plots are left out: they need matplotlib, pip install 'moonserve[plots]'"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts. `columns` are the titles of the cells after each row's head."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    head: str = ""


@cache
def templates(*folders: Path) -> jinja2.Environment:
    """Returns the environment of our templates and those in `folders`. It escapes all inserted text."""
    loader = jinja2.FileSystemLoader([Path(__file__).parent / "templates", *folders])
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def write_page(results: Sequence[SimulationResult], folder: Path | str) -> Path:
    """Writes page and results; returns the page's path. Raises ConfigError for no results or if writing fails.

    Without matplotlib, the page has tables only, and stderr says what to install.
    """
    if not results:
        raise ConfigError("there are no results to report")
    folder = Path(folder)
    write_text(folder / RESULTS, results_to_json(results))  # first: results are more expensive than plots
    if not plots.has_matplotlib():
        print(f"{folder / PAGE}: {NO_PLOTS}", file=sys.stderr)
    write_text(folder / PAGE, page(results))
    return folder / PAGE


def page(results: Sequence[SimulationResult]) -> str:
    """Returns the HTML document. All results must have the same trace and objectives."""
    runs = "" if len(results) == 1 else f", {len(results)} results"
    subjects = number_results(results)
    has_plots = plots.has_matplotlib()
    return templates().get_template("simulation.html").render(
        what=f"{len(results[0].outcomes):,} requests" + runs,
        answer=_answer(subjects),
        ttft=format_tick(results[0].ttft_slo_s),
        tbt=f"{results[0].tbt_slo_s * 1000:.6g}",
        notice="" if has_plots else f"{NO_PLOTS[0].upper()}{NO_PLOTS[1:]}",
        summary=Table(SUMMARY_COLUMNS, [(each.title, summary_cells(each.figures)) for each in subjects], "result"),
        sections=plots.sections(subjects) if has_plots else [],
        parts=_parts(subjects),
        counters=_counters(subjects),
    )  # fmt: skip


def _answer(subjects: Sequence[NumberedResult]) -> str:
    """Says what came out: of several results, the one with the most effective requests, then the lowest TTFT."""
    best = max(subjects, key=lambda each: (each.figures["effective_fraction"], -each.figures["mean_ttft_ms"]))
    cells = dict(zip(SUMMARY_COLUMNS, summary_cells(best.figures), strict=True))
    return (
        f"{f'Best: {best.title}. ' if len(subjects) > 1 else ''}{cells['effective']} of the requests are effective."
        f" TTFT p50 {cells['p50']} ms, p90 {cells['p90']} ms, p99 {cells['p99']} ms; TBT p90 {cells['TBT ms p90']} ms;"
        f" {cells['hits']} of prompt tokens from caches."
    )


def _parts(subjects: Sequence[NumberedResult]) -> Table:
    """Returns the parts of TTFT by result."""
    columns = {
        "queue": "queue_ms",
        "loading the prefix": "load_ms",
        "computing": "prefill_ms",
        "predicted − actual TTFT": "ttft_error_ms",
    }
    kinds = ("mean", "p90")
    rows = [
        (
            s.title,
            [format_ms_as_seconds(s.figures[f"{kind}_{name}"]) for name in columns.values() for kind in kinds],
        )
        for s in subjects
    ]
    return Table([f"{title}, {kind}" for title in columns for kind in kinds], rows, "result")


def _counters(subjects: Sequence[NumberedResult]) -> Table:
    """Returns a row per error and counter, a column per result."""
    found = [{**each.figures["errors"], **each.result.counters} for each in subjects]
    names = dict.fromkeys(name for each in found for name in each)
    rows = [
        (
            name.replace("_", " "),
            [format_scaled(each[name]) if name in each else NO_VALUE for each in found],
        )
        for name in names
    ]
    return Table([str(each.number) for each in subjects], rows, "result")
