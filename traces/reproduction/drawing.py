"""Plots of reproduced figures as SVG: lines as on the pages of simulations, published values as marks."""

from __future__ import annotations

from typing import Any

from traces.reports import canvas
from traces.reports.palette import Look, look_of
from traces.reports.picture import Key, Picture
from traces.reproduction.figure import Line, Plot

_HEIGHT_IN = 3.4
_FEW = 15  # points of a line, each of which is marked


def picture(plot: Plot, key: str) -> Picture:
    """`key`: unique on the page. Needs matplotlib."""
    looks = [look_of(index) for index in range(len(plot.lines))]
    with canvas.drawing(key):
        figure = canvas.new_figure(canvas.WIDTH_IN, _HEIGHT_IN)
        panel = figure.add_subplot()
        panel.set(xlabel=plot.x_label, ylabel=plot.y_label)
        marker = "o" if max(len(line.points) for line in plot.lines) <= _FEW else ""
        for line, look in zip(plot.lines, looks, strict=True):
            _draw(panel, line, look, marker)
        _scale(panel, plot)
        svg = canvas.to_svg(figure, key, f"{plot.title}: {plot.y_label} against {plot.x_label}")
    keys = (
        Key(label=line.label, look=look, filled=line.is_published)
        for line, look in zip(plot.lines, looks, strict=True)
    )
    return Picture(title=plot.title, svg=svg, legend=tuple(keys))


def _draw(panel: Any, line: Line, look: Look, marker: str) -> None:
    if not line.points:
        return
    xs, ys = zip(*line.points, strict=True)
    if line.is_published:
        panel.plot(xs, ys, "D", color=look.colour, markersize=7, zorder=3)
    else:
        panel.plot(xs, ys, color=look.colour, linestyle=look.line, marker=marker, markersize=4)


def _scale(panel: Any, plot: Plot) -> None:
    points = [point for line in plot.lines for point in line.points]
    if plot.log_x and points:
        low, high = min(x for x, _ in points), max(x for x, _ in points)
        panel.set(xscale="log", xlim=(low / 1.15, high * 1.15))
        canvas.logarithmic(panel.xaxis, low / 1.15, high * 1.15)
    else:
        canvas.plain_numbers(panel.xaxis)
    if plot.log_y and points:
        low, high = min(y for _, y in points), max(y for _, y in points)
        panel.set(yscale="log", ylim=(low / 1.3, high * 1.3))
        canvas.logarithmic(panel.yaxis, low / 1.3, high * 1.3)
        return
    panel.set_ylim(0, None if plot.y_unit != "%" else _ceiling(points))
    if plot.y_unit == "%":
        canvas.percents(panel.yaxis)
    else:
        canvas.plain_numbers(panel.yaxis)


def _ceiling(points: list[tuple[float, float]]) -> float:
    """Of fractions: all of it where lines come near, else what they need."""
    top = max((y for _, y in points), default=1.0)
    return 1.03 if top > 0.8 else top * 1.15
