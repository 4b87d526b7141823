"""How busy each instance was: a row per instance, time to the right, opacity for the root of the load.

The root, since a few long queues would leave all others invisible.
Instances of one kind (their names without the number) share a scale, also across results. Where a kind predicts its
queue, as prefill machines do, its load is that queue in seconds; else it is the number of requests that it has.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.reports import canvas
from traces.reports.numbers import tick
from traces.reports.picture import Picture, Section, Subject
from traces.reports.time_axis import TimeAxis, time_axis
from traces.simulator.results import InstanceSample, SimulationResult

MAX_COLUMNS = 180

NUDGE = 1e-6
"""Of a column: rounding moves no sample at a column's begin into the one before, and adds no column at the end."""

ROW_IN = 0.14
MAX_HEIGHT_IN = 9.0
LABEL_IN = 0.13  # a row's name needs so much
MAX_NAME = 18

_ROOM_IN = 0.75  # of a kind's title and the time axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What full opacity means."""

    in_seconds: bool
    top: float

    @property
    def label(self) -> str:
        return "predicted queue, s" if self.in_seconds else "requests, waiting and running"


def loads(subjects: Sequence[Subject]) -> Section:
    """Without pictures where nothing was sampled."""
    sampled = [each for each in subjects if each.result.instances]
    scales = _scales([each.result for each in sampled])
    axis = time_axis(subjects)
    return Section(
        title="Load of each instance",
        note="A row per instance; opacity grows with the root of the load, on the same scale in all results.",
        pictures=tuple(_picture(each, scales, axis) for each in sampled),
    )


def kind_of(instance_id: str) -> str:
    """ "prefill-12" → "prefill"."""
    return re.sub(r"[-_.:/ ]*\d+$", "", instance_id) or "instances"


def _natural(instance_id: str) -> tuple[int, int, str]:
    """prefill-2 before prefill-10."""
    digits = re.search(r"\d+$", instance_id)
    return len(digits.group()) if digits else 0, int(digits.group()) if digits else 0, instance_id


def kinds_of(samples: Sequence[InstanceSample]) -> dict[str, list[str]]:
    """Kinds in the order in which they appear, and their instances by number."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        kinds[kind_of(sample.instance_id)].add(sample.instance_id)
    return {kind: sorted(names, key=_natural) for kind, names in kinds.items()}


def _scales(results: Sequence[SimulationResult]) -> dict[str, Scale]:
    samples: dict[str, list[InstanceSample]] = defaultdict(list)
    for result in results:
        for sample in result.instances:
            samples[kind_of(sample.instance_id)].append(sample)
    scales = {}
    for kind, members in samples.items():
        in_seconds = any(sample.predicted_queue_s > 0 for sample in members)
        found = [_load(sample, in_seconds=in_seconds) for sample in members]
        top = max(filter(math.isfinite, found), default=0.0) or 1.0
        scales[kind] = Scale(in_seconds=in_seconds, top=top)
    return scales


def _load(sample: InstanceSample, *, in_seconds: bool) -> float:
    return sample.predicted_queue_s if in_seconds else float(sample.queued + sample.running)


def _picture(subject: Subject, scales: Mapping[str, Scale], axis: TimeAxis) -> Picture:
    samples = subject.result.instances
    kinds = kinds_of(samples)
    row_in = min(ROW_IN, MAX_HEIGHT_IN / sum(map(len, kinds.values())))
    heights = [max(len(names) * row_in, 0.3) for names in kinds.values()]
    length_s = column_length_s(samples, axis.end_s)
    key = f"load{subject.number}"
    with canvas.drawing(key):
        figure = canvas.new_figure(canvas.WIDTH_IN, sum(heights) + _ROOM_IN * len(kinds))
        cells = figure.add_gridspec(len(kinds), 2, width_ratios=[40, 1], height_ratios=heights)
        for index, (kind, names) in enumerate(kinds.items()):
            panel, bar = figure.add_subplot(cells[index, 0]), figure.add_subplot(cells[index, 1])
            scale = scales[kind]
            table = table_of(
                samples, names, in_seconds=scale.in_seconds, end_s=axis.end_s, length_s=length_s
            )
            _draw_table(panel, table / scale.top, table.shape[1] * length_s, axis)
            _name_rows(panel, names, row_in)
            panel.set_title(f"{kind}: {scale.label}", loc="left", fontsize=9)
            if index == len(kinds) - 1:
                panel.set_xlabel(axis.label)
            _draw_scale(bar, scale)
        svg = canvas.to_svg(figure, key, f"Load of instances over time, {subject.title}")
    return Picture(title=subject.title, svg=svg)


def column_length_s(samples: Sequence[InstanceSample], end_s: float) -> float:
    """A whole multiple of the usual time between samples, so that each column has equally many."""
    times = sorted({sample.at_s for sample in samples})
    typical_s = float(np.median(np.diff(times))) if len(times) > 1 else end_s
    return typical_s * math.ceil(end_s / typical_s / MAX_COLUMNS)


def table_of(
    samples: Sequence[InstanceSample],
    names: Sequence[str],
    *,
    in_seconds: bool,
    end_s: float,
    length_s: float,
) -> npt.NDArray[np.float64]:
    """`[instance, column]` mean loads of stretches of `length_s`; NaN where nothing was sampled."""
    num_columns = max(1, math.ceil(end_s / length_s - NUDGE))
    row_of = {name: row for row, name in enumerate(names)}
    sums = np.zeros((len(names), num_columns))
    counts = np.zeros((len(names), num_columns))
    for sample in samples:
        row = row_of.get(sample.instance_id)
        if row is not None:
            column = min(int(sample.at_s / length_s + NUDGE), num_columns - 1)
            sums[row, column] += _load(sample, in_seconds=in_seconds)
            counts[row, column] += 1
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _draw_table(panel: Any, shares: Any, end_s: float, axis: TimeAxis) -> None:
    """`shares`: of full opacity. The last column may reach beyond the axis."""
    panel.imshow(
        np.sqrt(shares), cmap=canvas.heat_map_colours(), vmin=0, vmax=1, aspect="auto",
        interpolation="none",
        extent=(0, end_s / axis.seconds_per_unit, len(shares) - 0.5, -0.5),
    )  # fmt: skip
    panel.set_xlim(0, axis.end)
    panel.grid(visible=False)


def _name_rows(panel: Any, names: Sequence[str], row_in: float) -> None:
    """As many as there is room for."""
    rows = range(0, len(names), max(1, math.ceil(LABEL_IN / row_in)))
    panel.set_yticks(list(rows), [_short(names[row]) for row in rows], fontsize=8)
    panel.tick_params(axis="y", length=0)


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[:9]}…{name[-8:]}"


def _draw_scale(bar: Any, scale: Scale) -> None:
    bar.imshow(
        np.linspace(0, 1, 64)[:, None], cmap=canvas.heat_map_colours(), vmin=0, vmax=1,
        aspect="auto", origin="lower", interpolation="none", extent=(0, 1, 0, 1),
    )  # fmt: skip
    bar.set_xticks([])
    marks = [scale.top * root**2 for root in (0, 0.5, 1)]
    bar.set_yticks((0, 0.5, 1), [tick(float(f"{mark:.3g}")) for mark in marks], fontsize=8)
    bar.yaxis.tick_right()
    bar.grid(visible=False)
    bar.spines[:].set_visible(False)
