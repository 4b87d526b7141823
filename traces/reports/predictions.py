"""How good the scheduler's word was: predicted against actual TTFT, one density per result on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.reports import canvas
from traces.reports.numbers import tick
from traces.reports.palette import MUTED
from traces.reports.picture import Picture, Section, Subject
from traces.simulator.results import SimulationResult

Floats = npt.NDArray[np.float64]

NUM_CELLS = 56  # a side
MAX_DECADES = 5
NEAR = 0.25  # of the actual TTFT: what the caption counts

_SIZE_IN = (4.2, 3.6)


def predictions(subjects: Sequence[Subject]) -> Section:
    """Requests with a first token and a prediction; without pictures where there are none."""
    pairs = [(each, pairs_of(each.result)) for each in subjects]
    told = [(each, values) for each, values in pairs if len(values)]
    pictures: tuple[Picture, ...] = ()
    if told:
        all_of = np.concatenate([values for _, values in told])
        high = float(np.log10(all_of.max())) + 0.05
        low = min(max(float(np.log10(all_of.min())) - 0.05, high - MAX_DECADES), high - 1)
        pictures = tuple(_picture(each, values, low, high) for each, values in told)
    return Section(
        title="Predicted against actual TTFT",
        note="Each cell counts requests, the darker or brighter the more, on a logarithmic scale. Right of the dotted"
        " line the first token came later than the scheduler had predicted.",
        pictures=pictures,
        narrow=True,
    )


def pairs_of(result: SimulationResult) -> Floats:
    """`[request, 2]`: actual and predicted seconds, of requests that have both, above 0."""
    pairs = np.array(
        [(o.ttft_s, o.predicted_ttft_s) for o in result.outcomes if o.ttft_s is not None],
        np.float64,
    ).reshape(-1, 2)
    kept: Floats = pairs[np.isfinite(pairs).all(axis=1) & (pairs > 0).all(axis=1)]
    return kept


def near_share(pairs: Floats) -> float:
    """Of the requests, whose prediction was off by at most NEAR of the actual TTFT."""
    return float(np.mean(np.abs(pairs[:, 1] - pairs[:, 0]) <= NEAR * pairs[:, 0]))


def _picture(subject: Subject, pairs: Floats, low: float, high: float) -> Picture:
    logs = np.clip(np.log10(pairs), low, high)
    counts, _, _ = np.histogram2d(
        logs[:, 1], logs[:, 0], bins=NUM_CELLS, range=[[low, high], [low, high]]
    )
    depth = np.where(counts > 0, 0.3 + 0.7 * np.log1p(counts) / np.log1p(counts.max()), np.nan)
    key = f"prediction{subject.number}"
    with canvas.drawing(key):
        figure = canvas.new_figure(*_SIZE_IN)
        panel = figure.add_subplot()
        panel.imshow(
            depth, cmap=canvas.heat_map_colours(), vmin=0, vmax=1, origin="lower", aspect="equal",
            interpolation="none", extent=(low, high, low, high), zorder=2,
        )  # fmt: skip
        panel.plot([low, high], [low, high], color=MUTED, linestyle=":", linewidth=1, zorder=3)
        panel.set(xlabel="actual TTFT, s", ylabel="predicted TTFT, s")
        ticks = _ticks(low, high)
        panel.set_xticks(*ticks)
        panel.set_yticks(*ticks)
        svg = canvas.to_svg(figure, key, f"Predicted against actual TTFT, {subject.title}")
    note = f"{near_share(pairs):.0%} of {len(pairs):,} within {NEAR:.0%}"
    return Picture(title=subject.title, note=note, svg=svg)


def _ticks(low: float, high: float) -> tuple[Any, list[str]]:
    """Places (logarithms) and their labels."""
    leads = (1, 2, 5) if high - low < 2 else (1,)
    decades = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    values = [float(f"{lead}e{decade}") for decade in decades for lead in leads]
    shown = [value for value in values if low <= np.log10(value) <= high]
    return np.log10(shown) if shown else [], [tick(value) for value in shown]
