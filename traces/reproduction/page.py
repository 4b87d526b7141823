"""Reproduced figures as one HTML page that needs nothing beside it. Pure: findings in, text out.

Equal findings give equal pages, so when and how long is not on it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from traces.reports import canvas
from traces.reports.numbers import NOTHING
from traces.reports.palette import STYLE
from traces.reports.picture import Key, Picture
from traces.reports.tables import key_mark
from traces.reproduction.drawing import picture
from traces.reproduction.figure import Claim, Figure, Finding, Row, Subject

_OWN_STYLE = """
a { color: var(--hue0); }
table { width: auto; min-width: min(100%, 46rem); }
tbody th { min-width: min(24rem, 45vw); }
td.why { text-align: left; color: var(--muted); white-space: normal; }
.claims { list-style: none; padding: 0; margin: .5rem 0 .75rem; }
.claims li { margin: .1rem 0; padding-left: 1.6em; text-indent: -1.6em; }
.claims b { display: inline-block; width: 1.6em; text-indent: 0; }
.holds b { color: var(--hue2); }
.fails b { color: var(--hue1); }
p.setting { font-size: .9rem; }
p.why { color: var(--ink); margin-top: .75rem; }
.grid { margin-top: 1rem; }
"""

_INTRODUCTION = (
    "Mooncake's published figures again, by this project's simulator: the conductor's and the stores' own decisions in"
    " virtual time, machines by the cost model that fits the published latencies (LLaMA3-70B on 8×A800 per machine)."
    " Beside each published value stands ours, their ratio, and below each table why they differ."
)


def page(subject: Subject, found: Sequence[tuple[Figure, Finding]], *, quick: bool) -> str:
    """The whole document. Without matplotlib it has no plots."""
    parts = [
        f"<h1>Published figures on {html.escape(subject.name)}</h1>",
        f"<p>{html.escape(_INTRODUCTION)}</p>",
        f"<p>{_extent(subject, quick=quick)}</p>",
        _contents(found),
        *(_section(subject, figure, finding) for figure, finding in found),
    ]
    return _document("\n".join(parts), html.escape(subject.name))


def _extent(subject: Subject, *, quick: bool) -> str:
    count = f"{len(subject.records):,} requests."
    if not quick:
        return count
    return f"{count} <b>Only the first tenth of the trace</b>: caches stay emptier, and numbers are not comparable."


def _contents(found: Sequence[tuple[Figure, Finding]]) -> str:
    rows = []
    for figure, finding in found:
        failed = sum(not claim.holds for claim in finding.claims)
        state = (
            f"{len(finding.claims) - failed} of {len(finding.claims)}"
            if finding.claims
            else NOTHING
        )
        title = f'<a href="#{figure.name}">{html.escape(figure.title)}</a>'
        rows.append(f'<tr><th scope="row">{title}</th><td>{state}</td></tr>')
    head = '<tr><th scope="col">figure</th><th scope="col">claims that hold</th></tr>'
    return _table(head, rows)


def _section(subject: Subject, figure: Figure, finding: Finding) -> str:
    missing = figure.missing(subject)
    parts = [
        f'<section>\n<h2 id="{figure.name}">{html.escape(figure.title)}</h2>',
        f'<p class="setting">{html.escape(figure.setting)}</p>',
        f'<p class="notice">{html.escape(missing)}</p>' if missing else "",
        _rows(finding.rows),
        _claims(finding.claims),
        _plots(figure, finding),
        f'<p class="why"><b>Why they differ.</b> {html.escape(finding.why)}</p>',
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _rows(rows: Sequence[Row]) -> str:
    has_why = any(row.why for row in rows)
    names = ["", "published", "ours", "ours ÷ published", *([""] if has_why else [])]
    head = "<tr>" + "".join(f'<th scope="col">{name}</th>' for name in names) + "</tr>"
    return _table(head, [_row(row, has_why=has_why) for row in rows])


def _row(row: Row, *, has_why: bool) -> str:
    ratio = NOTHING if row.ratio is None else f"{row.ratio:.2f}"
    cells = [_number(row.published, row.unit), _number(row.ours, row.unit), ratio]
    why = f'<td class="why">{html.escape(row.why)}</td>' if has_why else ""
    return (
        f'<tr><th scope="row">{html.escape(row.what)}</th>'
        f"{''.join(f'<td>{cell}</td>' for cell in cells)}{why}</tr>"
    )


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return NOTHING
    if unit == "%":
        return f"{value:.1%}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f} {unit}".strip()
    return f"{value:.3g} {unit}".strip() if abs(value) < 1 else f"{value:.2f} {unit}".strip()


def _claims(claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    items = "\n".join(
        f'<li class="{"holds" if claim.holds else "fails"}"><b>{"✓" if claim.holds else "✗"}</b>'
        f"{html.escape(claim.text)}</li>"
        for claim in claims
    )
    return f'<ul class="claims">\n{items}\n</ul>'


def _plots(figure: Figure, finding: Finding) -> str:
    if not finding.plots or not canvas.is_available():
        return ""
    pictures = "\n".join(
        _picture(picture(plot, f"{figure.name}-{index}"))
        for index, plot in enumerate(finding.plots)
    )
    return f'<div class="grid">\n{pictures}\n</div>'


def _picture(drawn: Picture) -> str:
    return (
        f"<figure><figcaption>{html.escape(drawn.title)}</figcaption>\n{drawn.svg}\n"
        f"{_legend(drawn.legend)}</figure>"
    )


def _legend(keys: Sequence[Key]) -> str:
    items = "\n".join(f"<li>{key_mark(key)}{html.escape(key.label)}</li>" for key in keys)
    return f'<ul class="legend">\n{items}\n</ul>'


def _table(head: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f'<div class="scroll"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _document(body: str, title: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Published figures on {title}</title>
<style>{STYLE}{_OWN_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
