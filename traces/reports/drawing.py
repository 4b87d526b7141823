"""Draws with matplotlib. Images are self-contained SVG.

Equal drawings give equal text, independent of earlier ones: no pyplot, no date, ids with a fixed salt.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from traces.reports.numbers import tick

WIDTH_IN = 6.5
_SETTINGS = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "moonserve",
    "text.parse_math": False,  # names may contain any character
}
_DASHES = ("-", "--", ":", "-.")


def line_style(index: int) -> dict[str, str]:
    """Returns the style of a line: ten colours, then the same with other dashes."""
    return {"color": f"C{index % 10}", "linestyle": _DASHES[index // 10 % len(_DASHES)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One drawing. `src` contains it as a data URL."""

    title: str
    src: str
    note: str = ""


def is_available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def image(
    title: str,
    draw: Callable[[Any], None],
    *,
    size_in: tuple[float, float] = (WIDTH_IN, 3.6),
    note: str = "",
) -> Image:
    """Returns the image of a matplotlib Figure that `draw` fills."""
    from matplotlib import style
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with style.context(["default", _SETTINGS]):
        figure = Figure(figsize=size_in, layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Image(title=title, note=note, src=f"data:image/svg+xml;base64,{encoded}")


def label_axes(panel: Any, *, percent_y: bool = False) -> None:
    """Formats the numbers of all axes, including logarithmic ones. Scales and limits must be set before."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(tick))
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
            axis.set_minor_formatter(NullFormatter())
    if percent_y:
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def legend(figure: Any, least: int = 2) -> None:
    """Adds a legend below a drawing of one panel, if it has at least `least` entries."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) >= least:
        names = [text if len(text) <= 40 else f"{text[:39]}…" for text in labels]
        figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        rows = math.ceil(len(labels) / 2)
        figure.set_figheight(figure.get_figheight() + 0.17 * rows)
