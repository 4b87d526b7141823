"""Results as one HTML page that needs nothing beside it. Pure: text in, text out.

What results lack has no section. Equal results give equal pages, so what simulating took is not on it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from traces.reports import canvas
from traces.reports.distributions import distributions
from traces.reports.loads import loads
from traces.reports.numbers import tick
from traces.reports.over_time import rejections, replicas
from traces.reports.palette import STYLE
from traces.reports.picture import Key, Picture, Section, Subject, subjects_of
from traces.reports.predictions import predictions
from traces.reports.sweeps import goodput_against_rate, hits_against_capacity
from traces.reports.tables import counters_table, key_mark, parts_table, summary_table
from traces.simulator.results import SimulationResult

INSTALL = "pip install 'moonserve[plots]'"
NO_PLOTS = f"the plots are left out: they need matplotlib, {INSTALL}"

_DRAWN = (
    distributions,
    goodput_against_rate,
    hits_against_capacity,
    rejections,
    predictions,
    replicas,
    loads,
)


def page(results: Sequence[SimulationResult]) -> str:
    """The whole document. Without matplotlib: tables, and a notice with the install line instead of plots."""
    subjects = subjects_of(results)
    parts = [
        f"<h1>Simulation of {_what(results)}</h1>",
        f"<p>{html.escape(_objectives(results))}</p>",
    ]
    has_plots = canvas.is_available()
    if not has_plots:
        parts.append(f'<p class="notice">{html.escape(_sentence(NO_PLOTS))}</p>')
    parts.append(summary_table(subjects))
    if has_plots:
        parts += [_section(draw(subjects)) for draw in _DRAWN]
    parts += _tables(subjects)
    return _document("\n".join(part for part in parts if part))


def _what(results: Sequence[SimulationResult]) -> str:
    sizes = sorted({len(each.outcomes) for each in results})
    count = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    runs = "" if len(results) == 1 else f", {len(results)} results"
    return f"{count} requests{runs}"


def _objectives(results: Sequence[SimulationResult]) -> str:
    ttft = ", ".join(tick(each) for each in sorted({r.ttft_slo_s for r in results}))
    tbt = ", ".join(
        tick(float(f"{each * 1000:.6g}")) for each in sorted({r.tbt_slo_s for r in results})
    )
    return (
        f"A request is effective when it completes with TTFT ≤ {ttft} s and TBT ≤ {tbt} ms. Rejected and failed ones"
        " are misses; latencies and hits are those of the completed ones."
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _tables(subjects: Sequence[Subject]) -> list[str]:
    counters = counters_table(subjects)
    return [
        "<h2>What first tokens waited for</h2>\n<p>Seconds, of completed requests.</p>",
        parts_table(subjects),
        "<h2>Counters</h2>" if counters else "",
        counters,
    ]


def _section(section: Section) -> str:
    if not section.pictures:
        return ""
    kind = "grid narrow" if section.narrow else "grid"
    pictures = "\n".join(_picture(each) for each in section.pictures)
    return (
        f"<section>\n<h2>{section.title}</h2>\n<p>{html.escape(section.note)}</p>\n"
        f'{_legend(section.legend)}<div class="{kind}">\n{pictures}\n</div></section>'
    )


def _picture(picture: Picture) -> str:
    note = f" <small>{html.escape(picture.note)}</small>" if picture.note else ""
    return (
        f"<figure><figcaption>{html.escape(picture.title)}{note}</figcaption>\n"
        f"{picture.svg}\n{_legend(picture.legend)}</figure>"
    )


def _legend(keys: Sequence[Key]) -> str:
    if not keys:
        return ""
    items = "\n".join(f"<li>{key_mark(key)}{html.escape(key.label)}</li>" for key in keys)
    return f'<ul class="legend">\n{items}\n</ul>\n'


def _document(body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Simulation report</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
