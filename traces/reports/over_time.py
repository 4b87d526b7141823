"""What happened when, one small drawing per result with the same axes: replicas of popular blocks, rejections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from traces.reports import canvas
from traces.reports.palette import look_of
from traces.reports.picture import Key, Picture, Section, Subject
from traces.reports.summary import error_of
from traces.reports.time_axis import TimeAxis, bin_length_s, time_axis
from traces.simulator.results import End, SimulationResult

RANKS = (1, 3, 10, 30, 100)
MAX_REASONS = 7  # that have a colour of their own; the rest is "other"
MAX_BINS = 60
OTHER = "other reasons"

_SIZE_IN = (4.2, 2.6)


def replicas(subjects: Sequence[Subject]) -> Section:
    """How many machines held the blocks of some ranks of popularity; without pictures where nothing was sampled."""
    sampled = [each for each in subjects if any(sample.replicas for sample in each.result.replicas)]
    axis = time_axis(subjects)
    most = max((n for s in sampled for r in s.result.replicas for n in r.replicas), default=0)
    ranks = [rank for rank in RANKS if any(_has_rank(each.result, rank) for each in sampled)]
    return Section(
        title="Replicas of popular blocks",
        note="Machines that hold the block of each rank of popularity (uses so far) at that moment.",
        pictures=tuple(_replicas(each, ranks, axis, most) for each in sampled),
        legend=tuple(
            Key(label=f"rank {rank}", look=look_of(index)) for index, rank in enumerate(ranks)
        ),
        narrow=True,
    )


def _has_rank(result: SimulationResult, rank: int) -> bool:
    return any(len(sample.replicas) >= rank for sample in result.replicas)


def _replicas(subject: Subject, ranks: Sequence[int], axis: TimeAxis, most: int) -> Picture:
    samples = subject.result.replicas
    times = [sample.at_s / axis.seconds_per_unit for sample in samples]
    key = f"replicas{subject.number}"
    with canvas.drawing(key):
        figure, panel = _panel(axis, "machines", most * 1.06 or 1)
        for index, rank in enumerate(ranks):  # later ones thinner: equal ones stay visible
            held = [s.replicas[rank - 1] if len(s.replicas) >= rank else math.nan for s in samples]
            panel.plot(
                times, held, drawstyle="steps-post", color=look_of(index).colour,
                linewidth=1.2 + 0.9 * (len(ranks) - 1 - index),
            )  # fmt: skip
        svg = canvas.to_svg(figure, key, f"Replicas over time, {subject.title}")
    return Picture(title=subject.title, svg=svg)


def rejections(subjects: Sequence[Subject]) -> Section:
    """Requests that did not complete, by reason, when they arrived; without pictures where all completed."""
    counts = {each.number: _errors(each.result) for each in subjects}
    hit = [each for each in subjects if counts[each.number]]
    axis = time_axis(subjects)
    length_s = bin_length_s(axis.end_s, MAX_BINS)
    reasons = _reasons([reason for each in hit for _, reason in counts[each.number]])
    stacks = {each.number: _stacks(counts[each.number], reasons, axis, length_s) for each in hit}
    top = max((float(stacks[each.number].sum(axis=0).max()) for each in hit), default=0.0)
    return Section(
        title="Rejections and failures",
        note=f"Requests that did not complete, by reason, per {length_s:g} s of arrivals.",
        pictures=tuple(
            _rejections(each, stacks[each.number], axis, length_s, top * 1.06) for each in hit
        ),
        legend=tuple(
            Key(label=reason, look=look_of(index), filled=True)
            for index, reason in enumerate(reasons)
        ),
        narrow=True,
    )


def _errors(result: SimulationResult) -> list[tuple[float, str]]:
    """When a request arrived and why it did not complete."""
    return [(o.arrived_s, error_of(o)) for o in result.outcomes if o.end is not End.COMPLETED]


def _reasons(found: Sequence[str]) -> list[str]:
    """The most frequent first."""
    ordered = sorted(Counter(found).items(), key=lambda item: (-item[1], item[0]))
    names = [name for name, _ in ordered]
    return names if len(names) <= MAX_REASONS + 1 else [*names[:MAX_REASONS], OTHER]


def _stacks(
    found: Sequence[tuple[float, str]], reasons: Sequence[str], axis: TimeAxis, length_s: float
) -> Any:
    """`[reason, bin]` counts."""
    counts = np.zeros((len(reasons), math.ceil(axis.end_s / length_s)), np.int64)
    for arrived_s, reason in found:
        row = reasons.index(reason if reason in reasons else OTHER)
        counts[row, min(int(arrived_s / length_s), counts.shape[1] - 1)] += 1
    return counts


def _rejections(
    subject: Subject, stacks: Any, axis: TimeAxis, length_s: float, top: float
) -> Picture:
    width = length_s / axis.seconds_per_unit
    lefts = np.arange(stacks.shape[1]) * width
    key = f"rejections{subject.number}"
    with canvas.drawing(key):
        figure, panel = _panel(axis, "requests", top)
        floor = np.zeros(stacks.shape[1], np.int64)
        for index, counts in enumerate(stacks):
            some = counts > 0
            panel.bar(
                lefts[some], counts[some], width, bottom=floor[some], align="edge",
                color=look_of(index).colour, linewidth=0,
            )  # fmt: skip
            floor = floor + counts
        svg = canvas.to_svg(figure, key, f"Rejections over time, {subject.title}")
    return Picture(title=subject.title, note=f"{int(stacks.sum()):,} in all", svg=svg)


def _panel(axis: TimeAxis, label: str, top: float) -> tuple[Any, Any]:
    figure = canvas.new_figure(*_SIZE_IN)
    panel = figure.add_subplot()
    panel.set(xlabel=axis.label, ylabel=label, xlim=(0, axis.end), ylim=(0, top))
    canvas.whole_numbers(panel.yaxis)
    return figure, panel
