"""From matplotlib to SVG that stands inside a page. The only file here that imports matplotlib.

Its rule: equal drawings are equal text, whatever was drawn before; so no pyplot, no date, ids from the drawing's own
key. Text stays text. Legends are the page's business: results have names of any length.
"""

from __future__ import annotations

import html
import importlib.util
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from traces.reports.numbers import tick
from traces.reports.palette import GRID, HEAT_RGB, INK, MUTED, with_variables

WIDTH_IN = 6.0  # 432 units: shown about 600 pixels wide, letters of 9 units are 12 pixels high
FONTS = (
    "'DejaVu Sans', Verdana, sans-serif"  # metrics of the first are what matplotlib lays out with
)

_SETTINGS = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "path.simplify": False,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # names may hold any sign
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}


def is_available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def drawing(key: str) -> Iterator[None]:
    """All of one figure, from its making to `to_svg`, happens inside."""
    from matplotlib import style

    with style.context(["default", {**_SETTINGS, "svg.hashsalt": key}]):
        yield


def new_figure(width_in: float, height_in: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=72, layout="constrained")


def to_svg(figure: Any, key: str, description: str) -> str:
    """An `<svg>` element; its ids begin with `key`, so that several fit on one page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    opening = re.search(r"<svg[^>]*>", text)
    assert opening is not None, "matplotlib writes SVG"
    view = re.search(r'viewBox="[^"]*"', opening.group())
    assert view is not None
    body = _with_own_ids(text[opening.end() :], key)
    body = re.sub(r"\n\s*", "\n", body).replace("'DejaVu Sans'", FONTS).strip()
    label = html.escape(description)
    return with_variables(
        f'<svg class="plot" {view.group()} role="img" aria-label="{label}">\n{body}'
    )


def _with_own_ids(body: str, key: str) -> str:
    """Ids that something refers to, each once and with `key` in front; matplotlib repeats equal ones."""
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))

    def named(match: re.Match[str]) -> str:
        if match.group(1) not in wanted:
            return ""
        wanted.remove(match.group(1))
        return f' id="{key}-{match.group(1)}"'

    return re.sub(r'(href="#|url\(#)', rf"\g<1>{key}-", re.sub(r' id="([^"]*)"', named, body))


def heat_map_colours() -> Any:
    """Opacity from faint to full, so that nothing measured (invisible) differs from zero."""
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([(*HEAT_RGB, 0.07 + 0.93 * step / 63) for step in range(64)])
    return colours.with_extremes(bad=(0, 0, 0, 0))


def logarithmic(axis: Any, low: float, high: float) -> None:
    """Plain numbers, the more of each decade the fewer decades there are. The scale must be set already."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(high / low)
    leads = (1, 1.5, 2, 3, 5, 7) if decades < 1.3 else (1, 2, 5) if decades < 3 else (1,)
    axis.set_major_locator(LogLocator(subs=leads, numticks=20))
    axis.set_major_formatter(FuncFormatter(tick))
    axis.set_minor_formatter(NullFormatter())


def whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def plain_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(tick))


def percents(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def label_points(panel: Any, points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Writes each label beside its point, where it is farthest from other points and labels. Limits are set already."""
    panel.figure.draw_without_rendering()  # lays out
    pixels = [tuple(panel.transData.transform(point)) for point in points]
    taken = list(pixels)
    for point, at, label in zip(points, pixels, labels, strict=True):
        others = [each for each in taken if each != at]
        dx, dy = max(_AROUND, key=lambda step: _room(at, step, others))
        taken.append((at[0] + dx, at[1] + dy))
        panel.annotate(
            label, point, (dx, dy), textcoords="offset pixels", ha="center", va="center", fontsize=8
        )


_AROUND = ((0, 13), (12, 9), (-12, 9), (14, 0), (-14, 0), (12, -9), (-12, -9), (0, -13))


def _room(
    at: tuple[float, ...], step: tuple[int, int], others: Sequence[tuple[float, ...]]
) -> float:
    distances = (math.dist((at[0] + step[0], at[1] + step[1]), each) for each in others)
    return min(min(distances, default=25.0), 25.0)  # beyond this all places are as good: the first
