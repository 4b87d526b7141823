"""Colours of a page, for light, dark and paper, and how results are told apart.

Plots are drawn once, in colours that only stand for names; the page's style sheet says what they are, so that one
drawing is readable on every background. Hues: eight that also differ in lightness; later results repeat them dashed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

INK, MUTED, GRID = "#010101", "#020202", "#030303"

_SERIES_LIGHT = (
    "#0b62b8", "#d1490c", "#0b8261", "#a3388f", "#a87400", "#1c96ad", "#7a4b2a", "#6a6f76",
)  # fmt: skip
_SERIES_DARK = (
    "#6cb4ff", "#ff9266", "#45d0a4", "#ec93dc", "#f2c14e", "#6fdcf0", "#cfa47e", "#b4bac2",
)  # fmt: skip
NUM_HUES = len(_SERIES_LIGHT)

HEAT_RGB = (0.13, 0.46, 0.85)  # seen through on light and on dark: only its opacity tells the value

_DASHES = ("", "5 2.5", "1.5 2", "6 2 1.5 2")  # lengths in line widths of 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one of several is told from the others, everywhere on a page."""

    hue: int
    dash: str

    @property
    def colour(self) -> str:
        """What matplotlib is given."""
        return f"#0101{self.hue + 0x10:02x}"

    @property
    def variable(self) -> str:
        """What the page says instead."""
        return f"var(--hue{self.hue})"

    @property
    def line(self) -> object:
        """matplotlib's line style."""
        return (0, tuple(float(each) for each in self.dash.split())) if self.dash else "-"


def look_of(index: int) -> Look:
    """Of the result at this place; after 32 they repeat."""
    return Look(hue=index % NUM_HUES, dash=_DASHES[index // NUM_HUES % len(_DASHES)])


_NAMED = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    **{look_of(hue).colour: look_of(hue).variable for hue in range(NUM_HUES)},
}
_IN_STYLE = re.compile(r"(?<=: )(" + "|".join(_NAMED) + r")(?=[;\"])")


def with_variables(svg: str) -> str:
    """The drawing with the page's colours."""
    return _IN_STYLE.sub(lambda match: _NAMED[match.group()], svg)


def _variables(base: dict[str, str], hues: tuple[str, ...]) -> str:
    colours = {**base, **{f"hue{index}": colour for index, colour in enumerate(hues)}}
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_LIGHT = _variables(
    {
        "paper": "#ffffff",
        "ink": "#1b1e23",
        "muted": "#5c636d",
        "grid": "#dfe2e6",
        "band": "#f4f6f8",
    },
    _SERIES_LIGHT,
)
_DARK = _variables(
    {
        "paper": "#14171b",
        "ink": "#e8eaed",
        "muted": "#a3abb6",
        "grid": "#343a42",
        "band": "#1d2126",
    },
    _SERIES_DARK,
)

STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", Verdana, sans-serif; }}
main {{ max-width: 1240px; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.15rem; margin: 2.25rem 0 .25rem; padding-top: .75rem; border-top: 1px solid var(--grid); }}
p {{ margin: .25rem 0 .75rem; color: var(--muted); max-width: 60rem; }}
.notice {{ color: var(--ink); border-left: 4px solid var(--hue1); padding: .5rem .75rem; background: var(--band); }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }}
th, td {{ padding: .3rem .5rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }}
th {{ font-weight: 600; vertical-align: bottom; }}
thead th {{ color: var(--muted); }}
thead tr:first-child th[colspan] {{ text-align: center; }}
tbody tr:nth-child(even) {{ background: var(--band); }}
th:first-child, tbody th {{ text-align: left; }}
tbody th {{ white-space: normal; overflow-wrap: anywhere; min-width: 9rem; font-weight: 500; }}
.grid {{ display: grid; gap: 1.25rem 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr)); }}
.grid.narrow {{ grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }}
figure {{ margin: 0; max-width: 46rem; min-width: 0; break-inside: avoid; }}
figcaption {{ font-weight: 600; font-size: .9rem; overflow-wrap: anywhere; margin-bottom: .25rem; }}
figcaption small {{ font-weight: 400; color: var(--muted); }}
figure svg.plot {{ display: block; width: 100%; height: auto; }}
svg.plot image {{ image-rendering: pixelated; }}
.legend {{ list-style: none; display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; margin: .35rem 0 .75rem; padding: 0;
  font-size: .82rem; }}
.legend li {{ overflow-wrap: anywhere; }}
.key {{ display: inline-block; width: 26px; height: 10px; vertical-align: middle; margin-right: .4em; }}
.box.key {{ width: 10px; }}
.number {{ color: var(--muted); font-variant-numeric: tabular-nums; }}
@media (max-width: 1000px) {{
  table {{ font-size: .72rem; }}
  th, td {{ padding: .25rem .27rem; }}
  tbody th {{ min-width: 7rem; }}
  tbody th .key {{ width: 16px; }}
}}
@media print {{
  :root {{ font-size: 12px; }}
  body {{ font-size: 11px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
  main {{ max-width: none; padding: 0; }}
  .scroll {{ overflow: visible; }}
  table {{ font-size: 8.5px; }}
  th, td {{ padding: .1rem .2rem; }}
  .grid {{ grid-template-columns: 1fr; }}
  .grid.narrow {{ grid-template-columns: 1fr 1fr; }}
  .grid:not(.narrow) figure {{ max-width: 150mm; }}
  h2, h2 + p, p + .legend {{ break-after: avoid; }}
  tr {{ break-inside: avoid; }}
}}
"""
