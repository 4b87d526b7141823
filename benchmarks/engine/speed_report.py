"""Formats the figures of `speed` as a table per run, and compares them with the bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engine.contestants import LLAMA_CPP, NATIVE, TRANSFORMERS, VLLM
from benchmarks.engine.shapes import SHAPES, Shape
from benchmarks.measure import table

Bar = dict[str, Any]
Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""contestant → shape's label → wall_s, processor_s, waited"""

_BARS = (
    # model, shape, compared with, least speed-up: issue 6, must-show 1
    ("110M", "B1 C512", VLLM, 1.7),
    ("110M", "B8 C512", VLLM, 1.7),
    ("110M", "B1 C2048", VLLM, 1.7),
    ("110M", "B8 C2048", VLLM, 1.7),
    ("110M", "B1 C512", LLAMA_CPP, 1.0),
    ("110M", "B8 C512", LLAMA_CPP, 2.0),
    ("110M", "B1 C2048", LLAMA_CPP, 1.0),
    ("110M", "B8 C2048", LLAMA_CPP, 2.0),
    ("110M", "prefill 2048", VLLM, 1.3),
    ("demo", "B1 C512", TRANSFORMERS, 10.0),
    ("demo", "B1 C2048", TRANSFORMERS, 10.0),
)


def speed_table(run: Mapping[str, Any], contestants: Sequence[str]) -> str:
    """Returns a table of ms per decode step and prompt tokens/s, by wall clock and (in brackets) processor time."""
    figures: Figures = run["figures"]
    measured = {label for own in figures.values() for label in own}
    shapes = [shape for shape in SHAPES if shape.label in measured]
    rows = [[_title(name, run), *_cells(figures.get(name), shapes)] for name in contestants]
    floors = [run["floor"].get(shape.label) for shape in shapes]
    floor = ["–" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in floors]
    rows.append([f"floor at {run['bytes_per_s'] / 1e9:.0f} GB/s", *floor])
    cores = "one core" if run["cores"] == 1 else f"{run['cores']} cores"
    title = f"{run['model']}, {run['dtype']}, {cores}: ms per step, tokens/s; wall (processor)"
    return table([title, *(shape.label for shape in shapes)], rows)


def _title(name: str, run: Mapping[str, Any]) -> str:
    return f"{name} (other tokens!)" if name in run["differing"] else name


def _cells(own: Mapping[str, Mapping[str, float]] | None, shapes: Sequence[Shape]) -> list[str]:
    if own is None:
        return ["not installed", *("–" for _ in shapes[1:])]
    return [_cell(own[shape.label], shape) for shape in shapes]


def _cell(seconds: Mapping[str, float], shape: Shape) -> str:
    wall, processor = seconds["wall_s"], seconds["processor_s"]
    if shape.prompt is not None:
        return f"{shape.prompt / wall:,.0f} ({shape.prompt / processor:,.0f})"
    return f"{wall * 1e3:.2f} ({processor * 1e3:.2f})"


def bars(runs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Compares speed-ups by wall clock on one core with bfloat16 with the bars; None where not measured."""
    found: dict[str, Figures] = {
        run["model"]: run["figures"] for run in runs if run["cores"] == 1 and run["dtype"] == "bfloat16"
    }
    return [_bar(found.get(model, {}), model, label, peer, least) for model, label, peer, least in _BARS]


def _bar(figures: Figures, model: str, label: str, peer: str, least: float) -> Bar:
    wall, processor = (_times_faster(figures, label, peer, clock) for clock in ("wall_s", "processor_s"))
    return {
        "claim": f"{model} {label}, times {peer}",
        "measured": wall,
        "of_processor": processor,
        "bar": least,
        "met": None if wall is None else wall >= least,
    }


def _times_faster(figures: Figures, label: str, peer: str, clock: str) -> float | None:
    own, others = (figures.get(name, {}).get(label) for name in (NATIVE, peer))
    return None if own is None or others is None else others[clock] / own[clock]
