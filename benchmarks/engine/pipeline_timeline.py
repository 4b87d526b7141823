"""Records when each stage computes each chunk of a prompt, and draws the spans as SVG."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.engine import Engine
from prefill_worker.pipeline.group import Follower

Span = tuple[float, float]
"""(begin, end) in seconds of the leader's clock."""

_WIDTH, _ROW, _LEFT, _TOP = 960, 30, 150, 34
_COLOURS = ("#2a9d8f", "#e9c46a")


class Notes:
    """Recorded spans of one row of the picture."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def watch_engine(self, engine: Engine) -> None:
        """Wraps `engine.execute` to record each further step."""
        execute = engine.execute

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return execute(*arguments, **options)
            finally:
                self.spans.append((began, time.perf_counter()))

        engine.execute = timed  # type: ignore[method-assign]

    def watch_follower(self, follower: Follower) -> None:
        """Wraps `follower.run` to record each step, from the call or the end of the previous step, to the answer."""
        run = follower.run

        async def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            outcome = await run(*arguments)
            free_at = self.spans[-1][1] if self.spans else 0.0
            self.spans.append((max(began, free_at), time.perf_counter()))
            return outcome

        follower.run = timed  # type: ignore[method-assign,assignment]


def picture(path: Path, title: str, rows: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Writes an SVG file with one row of chunks below the other. After a row without a name, time starts at 0 again."""
    clocks = [_zero([spans for name, spans in part if name]) for part in _parts(rows)]
    end_s = max(end for part in clocks for spans in part for _, end in spans)
    scale = (_WIDTH - _LEFT - 20) / end_s
    names = [name for name, _ in rows if name]
    body = [_text(10, 18, title, bold=True)]
    for place, (name, spans) in enumerate(zip(names, [s for part in clocks for s in part], strict=True)):
        top = _TOP + place * _ROW
        body.append(_text(_LEFT - 8, top + 15, name, anchor="end"))
        body += [
            f'<rect x="{_LEFT + begin * scale:.1f}" y="{top}" width="{max((end - begin) * scale - 1, 0.5):.1f}" '
            f'height="{_ROW - 8}" fill="{_COLOURS[chunk % 2]}"/>'
            + _text(int(_LEFT + (begin + end) / 2 * scale), top + 15, str(chunk), anchor="middle")
            for chunk, (begin, end) in enumerate(spans)
        ]
    bottom = _TOP + len(names) * _ROW
    marks = range(int(end_s) + 1)
    body += [_text(int(_LEFT + mark * scale), bottom + 14, f"{mark} s", anchor="middle") for mark in marks]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 24}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    path.write_text("\n".join([head, *body, "</svg>"]) + "\n")


def _parts(rows: Sequence[tuple[str, Sequence[Span]]]) -> list[list[tuple[str, Sequence[Span]]]]:
    parts: list[list[tuple[str, Sequence[Span]]]] = [[]]
    for row in rows:
        if row[0]:
            parts[-1].append(row)
        else:
            parts.append([])
    return parts


def _zero(rows: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Returns the spans with times counted from the earliest begin."""
    began = min(begin for spans in rows for begin, _ in spans)
    return [[(begin - began, end - began) for begin, end in spans] for spans in rows]


def _text(x: int, y: int, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{text}</text>'
