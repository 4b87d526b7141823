"""Reproduced figures as one self-contained HTML page (`traces/reports/reproduction.html`) and as JSON.

Equal findings give equal pages and JSON, so dates and durations are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pydantic_core

from traces.reports import drawing
from traces.reports.drawing import Image
from traces.reports.numbers import NOTHING
from traces.reports.page import Table, templates
from traces.reproduction.figure import Figure, Finding, Plot, Row, Subject

FORMAT = "moonserve reproduction 1"
_FEW = 15  # a line of at most this many points has markers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A figure as shown on the page."""

    figure: Figure
    missing: str
    rows: Table
    claims: Mapping[str, bool]
    images: Sequence[Image]
    why: str

    @property
    def holding(self) -> str:
        return f"{sum(self.claims.values())} of {len(self.claims)}" if self.claims else NOTHING


def page(subject: Subject, found: Sequence[tuple[Figure, Finding]], *, quick: bool) -> str:
    """Returns the HTML document. Without matplotlib it has no plots."""
    parts = [_part(subject, figure, finding) for figure, finding in found]
    template = templates().get_template("reproduction.html")
    return template.render(subject=subject, quick=quick, parts=parts)


def _part(subject: Subject, figure: Figure, finding: Finding) -> _Part:
    return _Part(
        figure=figure,
        missing=figure.missing(subject),
        rows=_table(finding.rows),
        claims=finding.claims,
        images=[_image(plot) for plot in finding.plots] if drawing.is_available() else [],
        why=finding.why,
    )


def _table(rows: Sequence[Row]) -> Table:
    has_why = any(row.why for row in rows)
    columns = ("published", "ours", "ours ÷ published", *(("why",) if has_why else ()))
    return Table(columns, [(row.what, _cells(row)[: len(columns)]) for row in rows])


def _cells(row: Row) -> list[str]:
    ratio = NOTHING if row.ratio is None else f"{row.ratio:.2f}"
    return [_number(row.published, row.unit), _number(row.ours, row.unit), ratio, row.why]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return NOTHING
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
        marker = "o" if max(len(line.points) for line in plot.lines) <= _FEW else ""
        for index, line in enumerate(plot.lines):
            xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
            if line.is_published:
                panel.plot(xs, ys, "D", color=f"C{index}", label=line.label, zorder=3)
            else:
                style = drawing.line_style(index)
                panel.plot(xs, ys, marker=marker, markersize=4, label=line.label, **style)
        if not plot.log_y:
            panel.set_ylim(bottom=0)
        drawing.label_axes(panel, percent_y=plot.y_unit == "%")
        drawing.legend(figure)

    return drawing.image(plot.title, draw)


def to_json(subject: Subject, found: Sequence[tuple[Figure, Finding]], *, quick: bool) -> str:
    """Returns the content of the page as JSON. NaN and infinity become null."""
    whole = {
        "format": FORMAT,
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
