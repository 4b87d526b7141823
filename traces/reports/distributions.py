"""Distributions of TTFT and TBT, of all results in one drawing each.

A curve counts *all* requests of its result, so that it ends as far below 100 % as requests were rejected or failed:
what latencies cost is in the same picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.reports import canvas
from traces.reports.numbers import tick
from traces.reports.palette import MUTED
from traces.reports.picture import Picture, Section, Subject, keys_of
from traces.simulator.results import End, SimulationResult

Floats = npt.NDArray[np.float64]

MAX_POINTS = 250  # of a curve: more are not seen
MAX_DECADES = 5  # values that are smaller still lie on the left edge


def distributions(subjects: Sequence[Subject]) -> Section:
    """TTFT and TBT; without pictures when no request completed."""
    pictures = (
        _picture("TTFT", "s", subjects, [_ttft(s.result) for s in subjects],
                 sorted({s.result.ttft_slo_s for s in subjects})),
        _picture("TBT", "ms", subjects, [_tbt(s.result) for s in subjects],
                 sorted({s.result.tbt_slo_s * 1000 for s in subjects})),
    )  # fmt: skip
    return Section(
        title="Latencies",
        note="Share of all requests that completed with at most this latency; a curve that ends below 100 % lacks the"
        " rejected and failed ones. TBT is the mean of the longest tenth of a request's gaps between tokens.",
        pictures=tuple(each for each in pictures if each is not None),
        legend=keys_of(subjects) if len(subjects) > 1 else (),
    )


def _ttft(result: SimulationResult) -> Floats:
    return _sorted([o.ttft_s for o in result.outcomes if o.end is End.COMPLETED], 1)


def _tbt(result: SimulationResult) -> Floats:
    return _sorted([o.tbt_s for o in result.outcomes if o.end is End.COMPLETED], 1000)


def _sorted(values: Sequence[float | None], factor: float) -> Floats:
    numbers = np.array([each for each in values if each is not None], np.float64) * factor
    return np.sort(numbers[np.isfinite(numbers)])


def _picture(
    name: str,
    unit: str,
    subjects: Sequence[Subject],
    samples: Sequence[Floats],
    limits: Sequence[float],
) -> Picture | None:
    positive = np.concatenate([each[each > 0] for each in samples])
    if not positive.size:
        return None
    high = max(float(positive.max()), *limits) * 1.15
    low = max(min(float(positive.min()), *limits), high / 10**MAX_DECADES) / 1.15
    key = name.lower()
    with canvas.drawing(key):
        figure = canvas.new_figure(canvas.WIDTH_IN, 3.4)
        panel = figure.add_subplot()
        panel.set(xscale="log", xlim=(low, high), ylim=(0, 1.005), xlabel=f"{name}, {unit}")
        canvas.logarithmic(panel.xaxis, low, high)
        canvas.percents(panel.yaxis)
        _objective(panel, limits, unit, low, high)
        for subject, sample in zip(subjects, samples, strict=True):
            if sample.size:
                _curve(panel, subject, sample, low, high)
        svg = canvas.to_svg(figure, key, f"Distribution of {name} per result")
    return Picture(title=name, svg=svg)


def _curve(panel: Any, subject: Subject, sample: Floats, low: float, high: float) -> None:
    x, y = cumulative(sample, len(subject.result.outcomes))
    panel.plot(
        np.maximum([*x, high], low), [*y, y[-1]], drawstyle="steps-post",
        color=subject.look.colour, linestyle=subject.look.line,
    )  # fmt: skip


def cumulative(ordered: Floats, num_requests: int) -> tuple[Floats, Floats]:
    """Values and the share of `num_requests` that is at most each; begins at 0, thinned to MAX_POINTS, ends kept."""
    ranks = np.arange(len(ordered))
    if len(ranks) > MAX_POINTS:
        ranks = np.unique(np.linspace(0, len(ordered) - 1, MAX_POINTS).round().astype(np.int64))
    shares = (ranks + 1) / num_requests
    return np.concatenate([ordered[:1], ordered[ranks]]), np.concatenate([[0.0], shares])


def _objective(panel: Any, limits: Sequence[float], unit: str, low: float, high: float) -> None:
    for limit in limits:
        panel.axvline(limit, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
    middle = (low * high) ** 0.5
    text = ", ".join(tick(float(f"{limit:.4g}")) for limit in limits)
    side = limits[-1] > middle
    panel.annotate(
        f"SLO {text} {unit}",
        (limits[-1] if side else limits[0], 1), xycoords=("data", "axes fraction"), xytext=(2, 3),
        textcoords="offset points", ha="right" if side else "left", fontsize=8, color=MUTED,
    )  # fmt: skip
