"""Draws a sequence diagram from text: `python docs/diagrams/sequence.py request.txt request.svg`.

The text has a line of actors and one per step (docs/diagrams/request.txt says how). Equal texts give equal pictures,
so that a test can tell a stale one. Knows nothing of what is drawn.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLUMN, ROW, HEAD, MARGIN = 168, 42, 34, 100  # pixels
INK, SOFT, DATA, PAPER = "#24324a", "#8a96ab", "#2f6fd0", "#ffffff"
_STEP = re.compile(r"(?P<source>[^>=:]+?)(?: (?P<kind>[>=]) (?P<target>[^:]+))?: (?P<text>.+)")


@dataclass(frozen=True, slots=True)
class Step:
    """From one actor's column to another's; to itself where it does something alone."""

    source: int
    target: int
    moves_data: bool
    text: str


def read(text: str) -> tuple[list[str], list[Step]]:
    """Actors and steps. Raises ValueError for a line that is neither."""
    actors: list[str] = []
    steps: list[Step] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("actors "):
            actors = [name.strip() for name in line.removeprefix("actors ").split("|")]
        elif not line.startswith("#"):
            steps.append(_step(line, actors))
    return actors, steps


def _step(line: str, actors: Sequence[str]) -> Step:
    match = _STEP.fullmatch(line)
    if match is None:
        raise ValueError(f"no step: {line!r}")
    source = actors.index(match["source"])
    target = actors.index(match["target"]) if match["target"] else source
    return Step(source, target, match["kind"] == "=", match["text"])


def draw(actors: Sequence[str], steps: Sequence[Step]) -> str:
    """The picture as SVG."""
    width = 2 * MARGIN + COLUMN * (len(actors) - 1)
    height = HEAD + ROW * (len(steps) + 1) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        _markers(),
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
    ]
    for column, actor in enumerate(actors):
        parts += _actor(column, actor, height)
    for row, step in enumerate(steps):
        parts += _drawn(row, step)
    return "\n".join([*parts, "</svg>", ""])


def _markers() -> str:
    arrows = [
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="{size}" markerHeight="{size}" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for name, color, size in (("message", INK, 8), ("data", DATA, 13))
    ]
    return f"<defs>{''.join(arrows)}</defs>"


def _actor(column: int, name: str, height: int) -> Iterator[str]:
    x = _x(column)
    yield f'<path d="M{x} {HEAD}V{height - 10}" stroke="{SOFT}" stroke-dasharray="2 4"/>'
    yield f'<rect x="{x - 62}" y="8" width="124" height="26" rx="5" fill="{INK}"/>'
    yield f'<text x="{x}" y="26" text-anchor="middle" fill="{PAPER}">{escape(name)}</text>'


def _drawn(row: int, step: Step) -> Iterator[str]:
    x, y = _x(step.source), HEAD + ROW * (row + 1) + 6
    number = f'<text x="8" y="{y + 4}" fill="{SOFT}" font-size="11">{row + 1}</text>'
    yield number
    if step.source == step.target:
        yield f'<circle cx="{x}" cy="{y}" r="4" fill="{INK}"/>'
        yield _text(x, y - 10, step.text, INK, "italic")
        return
    end, color = _x(step.target), DATA if step.moves_data else INK
    marker, stroke = ("data", 4) if step.moves_data else ("message", 1.5)
    tip = end - (5 if end > x else -5)
    yield (f'<path d="M{x} {y}H{tip}" stroke="{color}" stroke-width="{stroke}" marker-end="url(#{marker})"/>')
    yield _text((x + end) // 2, y - 10, step.text, color, "normal")


def _text(x: int, y: int, text: str, color: str, style: str) -> str:
    """On paper of its own, so that no line runs through it."""
    return (
        f'<text x="{x}" y="{y}" text-anchor="middle" fill="{color}" font-style="{style}" '
        f'stroke="{PAPER}" stroke-width="5" paint-order="stroke">{escape(text)}</text>'
    )


def _x(column: int) -> int:
    return MARGIN + COLUMN * column


def main(argv: Sequence[str]) -> int:
    """`argv`: the text's file and the picture's."""
    source, target = map(Path, argv)
    target.write_text(draw(*read(source.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
