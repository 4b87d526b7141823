"""One figure of each result against the number in which the results differ: rate, capacity.

Points carry the results' numbers on the page; those of one series are joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from traces.reports import canvas
from traces.reports.palette import MUTED
from traces.reports.picture import Picture, Section, Subject, keys_of

SAME_RATE = 1.01
"""Rates this close are one rate: the same trace, cut a little differently."""

WIDE = 8
"""From this ratio of largest to smallest on, the axis is logarithmic."""


def goodput_against_rate(subjects: Sequence[Subject]) -> Section:
    """Without pictures unless the results' rates differ."""
    points = [
        (each, float(each.figures["request_rate"]), float(each.figures["request_goodput"]))
        for each in subjects
        if each.figures["request_rate"] is not None
    ]
    rates = [x for _, x, _ in points]
    pictures: tuple[Picture, ...] = ()
    if rates and max(rates) > SAME_RATE * min(rates):
        svg = _draw("goodput", points, "arrivals, requests/s", "goodput, requests/s", diagonal=True)
        pictures = (Picture(title="Goodput", svg=svg, legend=_legend(points)),)
    return Section(
        title="Goodput against rate",
        note="Goodput counts the requests per second that met both objectives; on the dotted line all would.",
        pictures=pictures,
    )


def hits_against_capacity(subjects: Sequence[Subject]) -> Section:
    """Without pictures unless capacities are known and differ."""
    points = [
        (each, float(each.result.capacity_tokens), float(each.figures["hit_ratio"]))
        for each in subjects
        if each.result.capacity_tokens
    ]
    pictures: tuple[Picture, ...] = ()
    if len({x for _, x, _ in points}) > 1:
        svg = _draw("hits", points, "prefix cache, tokens", "hits / prompt tokens", diagonal=False)
        pictures = (Picture(title="Hit ratio", svg=svg, legend=_legend(points)),)
    return Section(
        title="Hit rate against capacity",
        note="Share of the completed requests' prompt tokens that were read instead of computed; capacity is that of"
        " all machines together.",
        pictures=pictures,
    )


Points = Sequence[tuple[Subject, float, float]]


def _legend(points: Points) -> Any:
    return keys_of([subject for subject, _, _ in points], filled=True)


def _draw(key: str, points: Points, x_label: str, y_label: str, *, diagonal: bool) -> str:
    low, high = min(x for _, x, _ in points), max(x for _, x, _ in points)
    top = max(high if diagonal else 0.0, *(y for _, _, y in points)) or 1.0
    with canvas.drawing(key):
        figure = canvas.new_figure(canvas.WIDTH_IN, 3.6)
        panel = figure.add_subplot()
        panel.set(xlabel=x_label, ylabel=y_label, ylim=(0, top * 1.15))
        if low > 0 and high / low >= WIDE:
            panel.set(xscale="log", xlim=(low / 1.2, high * 1.2))
            canvas.logarithmic(panel.xaxis, low / 1.2, high * 1.2)
        else:
            margin = (high - low) * 0.06
            panel.set_xlim(low - margin, high + margin)
            canvas.plain_numbers(panel.xaxis)
        if diagonal:
            panel.plot([low, high], [low, high], color=MUTED, linestyle=":", linewidth=1)
        _join(panel, points)
        for subject, x, y in points:
            panel.plot([x], [y], "o", color=subject.look.colour, markersize=6)
        places = [(x, y) for _, x, y in points]
        canvas.label_points(panel, places, [str(subject.number) for subject, _, _ in points])
        return canvas.to_svg(figure, key, f"{y_label} against {x_label}, a point per result")


def _join(panel: Any, points: Points) -> None:
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for subject, x, y in points:
        if subject.result.series:
            series[subject.result.series].append((x, y))
    for members in series.values():
        panel.plot(
            *zip(*sorted(members), strict=True), color=MUTED, linewidth=1, alpha=0.8, zorder=1
        )
