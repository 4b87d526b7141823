"""The tables of a page, as HTML. Every text from outside is escaped here."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from traces.reports.numbers import NOTHING, percent, plain, scaled, seconds
from traces.reports.picture import Key, Subject

_GROUPS = (
    ("", ("result",)),
    ("requests", ("all", "rejected", "failed", "per s")),
    ("goodput", ("per s", "effective")),
    ("", ("hits",)),
    ("TTFT, s", ("mean", "p50", "p90", "p99")),
    ("TBT, ms", ("mean", "p90", "p99")),
)


def summary_table(subjects: Sequence[Subject]) -> str:
    """One row per result: rejections beside latencies."""
    groups = "".join(
        f'<th colspan="{len(columns)}" scope="colgroup">{title}</th>' for title, columns in _GROUPS
    )
    names = [name for _, columns in _GROUPS for name in columns]
    head = f"<tr>{groups}</tr>\n<tr>{_header(names)}</tr>"
    return _table(head, [_row(_named(each), _summary_cells(each.figures)) for each in subjects])


def _summary_cells(figures: Mapping[str, Any]) -> list[str]:
    rate = figures["request_rate"]
    return [
        plain(figures["num_requests"]),
        plain(figures["rejected"]),
        plain(figures["failed"]),
        NOTHING if rate is None else f"{rate:.2f}",
        f"{figures['request_goodput']:.2f}",
        percent(figures["effective_fraction"]),
        percent(figures["hit_ratio"]),
        *(seconds(figures[f"{kind}_ttft_ms"]) for kind in ("mean", "p50", "p90", "p99")),
        *(_tenths(figures[f"{kind}_tbt_ms"]) for kind in ("mean", "p90", "p99")),
    ]


def _tenths(value: float) -> str:
    return f"{value:,.1f}" if math.isfinite(value) else NOTHING


def parts_table(subjects: Sequence[Subject]) -> str:
    """What first tokens waited for, in seconds."""
    columns = [
        ("queue", "queue_ms"),
        ("loading the prefix", "load_ms"),
        ("computing", "prefill_ms"),
    ]
    groups = "".join(
        f'<th colspan="2" scope="colgroup">{title}</th>'
        for title in (*(title for title, _ in columns), "predicted − actual TTFT")
    )
    names = ["result", *("mean", "p90") * (len(columns) + 1)]
    head = f"<tr><th></th>{groups}</tr>\n<tr>{_header(names)}</tr>"
    rows = []
    for each in subjects:
        cells = [
            seconds(each.figures[f"{kind}_{name}"])
            for name in (*(name for _, name in columns), "ttft_error_ms")
            for kind in ("mean", "p90")
        ]
        rows.append(_row(_named(each), cells))
    return _table(head, rows)


def counters_table(subjects: Sequence[Subject]) -> str:
    """A row per error and counter, a column per result; empty without any."""
    found = [
        (
            {name: float(count) for name, count in each.figures["errors"].items()},
            dict(each.result.counters),
        )
        for each in subjects
    ]
    rows = []
    for part in (0, 1):
        names = dict.fromkeys(name for pair in found for name in pair[part])
        for name in names:
            cells = [scaled(pair[part][name]) if name in pair[part] else NOTHING for pair in found]
            rows.append(_row(html.escape(name.replace("_", " ")), cells))
    if not rows:
        return ""
    titles = "".join(
        f'<th scope="col" title="{html.escape(each.result.name)}">{each.number}</th>'
        for each in subjects
    )
    return _table(f'<tr><th scope="col">result</th>{titles}</tr>', rows)


def _named(subject: Subject) -> str:
    key = key_mark(Key(label="", look=subject.look))
    return f'{key}<span class="number">{subject.number}</span> {html.escape(subject.result.name)}'


def key_mark(key: Key) -> str:
    """The little sign in front of a legend's label."""
    colour = key.look.variable
    if key.filled:
        kind, width = "box key", 10
        shape = f'<rect width="10" height="10" rx="2" style="fill: {colour}"/>'
    else:
        kind, width = "key", 26
        shape = (
            f'<line x1="0" y1="5" x2="26" y2="5" stroke-width="3"'
            f' stroke-dasharray="{key.look.dash or "none"}" style="stroke: {colour}"/>'
        )
    return f'<svg class="{kind}" viewBox="0 0 {width} 10" aria-hidden="true">{shape}</svg>'


def _header(names: Sequence[str]) -> str:
    return "".join(f'<th scope="col">{name}</th>' for name in names)


def _row(head: str, cells: Sequence[str]) -> str:
    return f'<tr><th scope="row">{head}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _table(head: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f'<div class="scroll"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table></div>'
