"""Figure 9 of FAST'25: hit ratio by size of a single cache."""

from __future__ import annotations

from traces.analysis.capacity import HitCurve, hit_curve
from traces.analysis.prefixes import prefix_tree
from traces.reproduction.figure import (
    CONVERSATION,
    Figure,
    Finding,
    Line,
    Plot,
    Results,
    Row,
    Subject,
)

_FROM_THE_TRACE: dict[int | None, float] = {
    3_000_000: 0.138,
    10_000_000: 0.291,
    30_000_000: 0.366,
    None: 0.373,
}
_TOLERANCE = 0.01
_SHARE_AT_3M = 0.435  # the middle of the published 41 … 46 %
_CAPACITIES = (
    *(round(lead * 10**power) for power in (5, 6, 7) for lead in (1, 1.5, 2, 3, 5, 7)),
    100_000_000,
)

_WHY = (
    "The curve is exact: LRU of full blocks, all capacities in one pass. The published share of the maximum at 3M"
    " tokens is higher (41–46 %). In a cache that holds whole prompts the hits of requests that overlap in time count"
    " although their blocks are being computed; ours, one request after the other, counts these as well. What"
    " remains is how the partial last block is counted, which the paper does not say."
)


def finding(subject: Subject, _results: Results) -> Finding:
    curve = _curve(subject)
    most = curve.ratio(None)
    rows = [
        Row(
            f"hit ratio at {_tokens(capacity)}",
            curve.ratio(capacity),
            subject.published(value),
            unit="%",
        )
        for capacity, value in _FROM_THE_TRACE.items()
    ]
    rows.append(
        Row(
            "share of the maximum at 3M tokens",
            curve.ratio(3_000_000) / most if most else 0.0,
            subject.published(_SHARE_AT_3M),
            unit="%",
        )
    )
    line = Line("LRU", tuple((c, curve.ratio(c)) for c in _CAPACITIES))
    anchors = Line(
        "stated for the conversation trace",
        tuple((c, v) for c, v in _FROM_THE_TRACE.items() if c),
        is_published=True,
    )
    plot = Plot(
        "Hit ratio",
        "cache, tokens",
        "hits / prompt tokens",
        (line, anchors) if subject.is_conversation else (line,),
        y_unit="%",
        log_x=True,
    )
    return Finding(rows=tuple(rows), claims=_claims(subject, rows), plots=(plot,), why=_WHY)


def _curve(subject: Subject) -> HitCurve:
    records = subject.records
    return hit_curve(
        prefix_tree(records),
        input_tokens=sum(record.input_length for record in records),
        tokens_per_block=records[0].tokens_per_hash,
    )


def _claims(subject: Subject, rows: list[Row]) -> dict[str, bool]:
    ratios = [row.ours or 0.0 for row in rows[:-1]]
    claims = {"more room, more hits": ratios == sorted(ratios)}
    if subject.is_conversation:
        both = [(r.ours, r.published) for r in rows[:-1] if r.ours and r.published]
        near = all(abs(ours - published) <= _TOLERANCE for ours, published in both)
        claims["0.138 / 0.291 / 0.366 / 0.373, each within 0.01"] = near
    return claims


def _tokens(capacity: int | None) -> str:
    return "unlimited room" if capacity is None else f"{capacity // 1_000_000}M tokens"


FIGURE = Figure(
    name="figure-9",
    title="Figure 9: hits against capacity",
    setting="One cache for all requests, one request after the other. Published values of the first four rows: those"
    " that are stated to follow from the trace; the last one is the paper's.",
    finding=finding,
    published_for=CONVERSATION,
)
