"""Draws loading and computing as an SVG timeline, with a row each for the load, the engine and the handoff."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.engine.overlap_record import Record, Span

_WIDTH, _ROW, _LEFT, _TOP = 960, 26, 150, 34
_COLOURS = {
    "lease": "#8d99ae",
    "read": "#3a86ff",
    "verify": "#8338ec",
    "compute": "#2a9d8f",
    "send": "#e76f51",
}


def picture(path: Path, title: str, records: Sequence[tuple[str, Record]]) -> None:
    """Writes an SVG file with the records below each other on one scale in milliseconds."""
    end_s = max(end for _, record in records for _, end in [*record.steps, *record.sends])
    rows: list[str] = []
    top = _TOP
    for name, record in records:
        rows.append(_text(10, top + 14, name, bold=True))
        rows += _spans("lease", record.leases, top, end_s)
        rows += _spans("read", record.turns, top, end_s)
        rows += _spans("verify", record.checks, top, end_s)
        rows.append(_text(_LEFT - 8, top + 14, "load", anchor="end"))
        top += _ROW
        rows += _spans("compute", _computing(record), top, end_s)
        rows.append(_text(_LEFT - 8, top + 14, "engine", anchor="end"))
        top += _ROW
        rows += _spans("send", record.sends, top, end_s)
        rows.append(_text(_LEFT - 8, top + 14, "handoff", anchor="end"))
        top += _ROW + 14
    rows += _axis(top, end_s)
    height = top + 54
    legend = [
        f'<rect x="{_LEFT + 130 * i}" y="{height - 20}" width="12" height="12" fill="{colour}"/>'
        + _text(_LEFT + 130 * i + 18, height - 10, name)
        for i, (name, colour) in enumerate(_COLOURS.items())
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    body = [_text(10, 18, title, bold=True), *rows, *legend]
    path.write_text("\n".join([head, *body, "</svg>"]) + "\n")


def _computing(record: Record) -> list[Span]:
    """Returns the spans of computing: the steps without their pauses, so one span per layer."""
    spans: list[Span] = []
    for begin, end in record.steps:
        at = begin
        for pause in record.pauses:
            if begin <= pause[0] <= end:
                spans.append((at, pause[0]))
                at = pause[1]
        spans.append((at, end))
    return spans


def _spans(kind: str, spans: Sequence[Span], top: int, end_s: float) -> list[str]:
    scale = (_WIDTH - _LEFT - 20) / end_s
    return [
        f'<rect x="{_LEFT + begin * scale:.1f}" y="{top}" width="{max((end - begin) * scale - 0.6, 0.4):.1f}" '
        f'height="{_ROW - 6}" fill="{_COLOURS[kind]}" fill-opacity="{0.5 if kind == "send" else 1}"/>'
        for begin, end in spans
    ]


def _axis(top: int, end_s: float) -> list[str]:
    scale = (_WIDTH - _LEFT - 20) / end_s
    step_ms = next(s for s in (10, 20, 50, 100, 200, 500, 1000, 5000) if end_s * 1e3 / s <= 12)
    marks = range(0, int(end_s * 1e3) + 1, step_ms)
    return [
        f'<line x1="{_LEFT + ms * scale / 1e3:.1f}" y1="{_TOP - 6}" x2="{_LEFT + ms * scale / 1e3:.1f}" '
        f'y2="{top}" stroke="#ddd"/>' + _text(_LEFT + int(ms * scale / 1e3), top + 14, f"{ms} ms", anchor="middle")
        for ms in marks
    ]


def _text(x: int, y: int, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
