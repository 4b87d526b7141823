"""Plots of results. A result has the same number and line style in all plots; without data it has no image."""

import base64
import importlib.util
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonserve.traces.output import format_tick
from moonserve.traces.simulator.results import End, InstanceSample, SimulationResult, error_of, summary

# Draws with matplotlib. Images are self-contained SVG.
#
# Equal drawings give equal text, independent of earlier ones: no pyplot, no date, ids with a fixed salt.

WIDTH_IN = 6.5
_SETTINGS = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "moonserve",
    "text.parse_math": False,  # names may contain any character
}
_DASHES = ("-", "--", ":", "-.")


def line_style(index: int) -> dict[str, str]:
    """Returns the style of a line: ten colours, then the same with other dashes."""
    return {"color": f"C{index % 10}", "linestyle": _DASHES[index // 10 % len(_DASHES)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One drawing. `src` contains it as a data URL."""

    title: str
    src: str
    note: str = ""


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_image(
    title: str,
    draw: Callable[[Any], None],
    *,
    size_in: tuple[float, float] = (WIDTH_IN, 3.6),
    note: str = "",
) -> Image:
    """Returns the image of a matplotlib Figure that `draw` fills."""
    from matplotlib import style
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with style.context(["default", _SETTINGS]):
        figure = Figure(figsize=size_in, layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Image(title=title, note=note, src=f"data:image/svg+xml;base64,{encoded}")


def label_axes(panel: Any, *, percent_y: bool = False) -> None:
    """Formats the numbers of all axes, including logarithmic ones. Scales and limits must be set before."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(format_tick))
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
            axis.set_minor_formatter(NullFormatter())
    if percent_y:
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def legend(figure: Any, least: int = 2) -> None:
    """Adds a legend below a drawing of one panel, if it has at least `least` entries."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) >= least:
        names = [text if len(text) <= 40 else f"{text[:39]}…" for text in labels]
        figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        rows = math.ceil(len(labels) / 2)
        figure.set_figheight(figure.get_figheight() + 0.17 * rows)


Floats = npt.NDArray[np.float64]

MAX_POINTS = 250  # per curve: more are not visible
MAX_DECADES = 5  # of latencies; smaller ones are at the left edge
MAX_BINS = 60  # of time
NEAR = 0.25  # share of the actual TTFT, for the caption's count
RANKS = (1, 3, 10, 30, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedResult:
    """A result with its number on the page."""

    number: int
    result: SimulationResult
    figures: Mapping[str, Any]  # its summary

    @property
    def title(self) -> str:
        return f"{self.number} {self.result.name}"

    @property
    def line(self) -> dict[str, str]:
        """The style of its lines."""
        return line_style(self.number - 1)


def number_results(results: Sequence[SimulationResult]) -> list[NumberedResult]:
    return [
        NumberedResult(number=number, result=result, figures=summary(result))
        for number, result in enumerate(results, start=1)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Images that answer one question."""

    title: str
    note: str
    images: tuple[Image, ...]
    is_narrow: bool = False  # small images, several in a row


def sections(subjects: Sequence[NumberedResult]) -> list[Section]:
    """Returns the sections that have an image."""
    drawn = (latencies, rejections, predictions, replicas, loads)
    return [section for draw in drawn if (section := draw(subjects)).images]


def latencies(subjects: Sequence[NumberedResult]) -> Section:
    """Plots latencies as shares of all requests, so that rejections are visible in the same plot."""
    ttft = _distribution(
        "TTFT", "s", subjects, [s.result.ttft_slo_s for s in subjects],
        [_latencies(s.result, "ttft_s") for s in subjects],
    )  # fmt: skip
    tbt = _distribution(
        "TBT", "ms", subjects, [s.result.tbt_slo_s * 1000 for s in subjects],
        [_latencies(s.result, "tbt_s") * 1000 for s in subjects],
    )  # fmt: skip
    return Section(
        title="Latencies",
        note="Share of all requests that completed with at most this latency; a curve that ends below 100 % lacks the"
        " rejected and failed ones. Dashed: the objective. TBT is the mean of the longest tenth of a request's gaps"
        " between tokens.",
        images=(*ttft, *tbt),
    )


def _latencies(result: SimulationResult, name: str) -> Floats:
    found = [getattr(each, name) for each in result.outcomes if each.end is End.COMPLETED]
    return np.sort(np.array([each for each in found if each is not None], np.float64))


def _distribution(
    name: str,
    unit: str,
    subjects: Sequence[NumberedResult],
    limits: Sequence[float],
    samples: Sequence[Floats],
) -> tuple[Image, ...]:
    positive = np.concatenate([each[each > 0] for each in samples])
    if not positive.size:
        return ()
    high = max(float(positive.max()), *limits) * 1.15
    low = max(min(float(positive.min()), *limits), high / 10**MAX_DECADES) / 1.15

    def draw(figure: Any) -> None:
        panel = figure.add_subplot(xscale="log", xlabel=f"{name}, {unit}")
        panel.set(xlim=(low, high), ylim=(0, 1.005))
        label_axes(panel, percent_y=True)
        for limit in set(limits):
            panel.axvline(limit, color="grey", linestyle="--", linewidth=1)
        for subject, sample in zip(subjects, samples, strict=True):
            if sample.size:
                x, y = cumulative(sample, len(subject.result.outcomes))
                xs = np.maximum([*x, high], low)
                panel.plot(xs, [*y, y[-1]], drawstyle="steps-post", label=subject.title, **subject.line)
        legend(figure)

    return (draw_image(name, draw),)


def cumulative(ordered: Floats, num_requests: int) -> tuple[Floats, Floats]:
    """Returns values and the share of `num_requests` at most as large, from 0, thinned to MAX_POINTS with both ends."""
    ranks = np.arange(len(ordered))
    if len(ranks) > MAX_POINTS:
        ranks = np.unique(np.linspace(0, len(ordered) - 1, MAX_POINTS).round().astype(np.int64))
    shares = (ranks + 1) / num_requests
    return np.concatenate([ordered[:1], ordered[ranks]]), np.concatenate([[0.0], shares])


def rejections(subjects: Sequence[NumberedResult]) -> Section:
    """Plots arrivals of requests that did not complete, by reason."""
    found = {
        each.number: [(o.arrived_s, error_of(o)) for o in each.result.outcomes if o.end is not End.COMPLETED]
        for each in subjects
    }
    counts = Counter(reason for errors in found.values() for _, reason in errors)
    reasons = [reason for reason, _ in counts.most_common()]
    end_s = max((each.result.duration_s for each in subjects), default=0.0) or 1.0

    def drawn(subject: NumberedResult) -> Image:
        errors = found[subject.number]
        columns = [[at for at, each in errors if each == reason] for reason in reasons]

        def draw(figure: Any) -> None:
            panel = figure.add_subplot(xlabel="time, s", ylabel="requests", xlim=(0, end_s))
            panel.hist(columns, bins=MAX_BINS, range=(0, end_s), stacked=True, label=reasons)
            legend(figure, least=1)

        return draw_image(subject.title, draw, size_in=(4.2, 3.0), note=f"{len(errors):,} in all")

    return Section(
        title="Rejections and failures",
        note="Requests that did not complete, by reason, when they arrived.",
        images=tuple(drawn(each) for each in subjects if found[each.number]),
        is_narrow=True,
    )


def predictions(subjects: Sequence[NumberedResult]) -> Section:
    """Plots predicted against actual TTFT, for requests that have both."""
    pairs = [(each, pairs_of(each.result)) for each in subjects]
    return Section(
        title="Predicted against actual TTFT",
        note="Each cell counts requests, on a logarithmic scale. Right of the dotted line the first token came later"
        " than the scheduler had predicted.",
        images=tuple(_prediction(each, values) for each, values in pairs if len(values)),
        is_narrow=True,
    )


def pairs_of(result: SimulationResult) -> Floats:
    """Returns `[request, 2]`: actual and predicted seconds, of requests for which both are above 0."""
    pairs = np.array(
        [(o.ttft_s, o.predicted_ttft_s) for o in result.outcomes if o.ttft_s is not None],
        np.float64,
    ).reshape(-1, 2)
    kept: Floats = pairs[np.isfinite(pairs).all(axis=1) & (pairs > 0).all(axis=1)]
    return kept


def near_share(pairs: Floats) -> float:
    """Returns the share of requests whose prediction was off by at most NEAR of the actual TTFT."""
    return float(np.mean(np.abs(pairs[:, 1] - pairs[:, 0]) <= NEAR * pairs[:, 0]))


def _prediction(subject: NumberedResult, pairs: Floats) -> Image:
    def draw(figure: Any) -> None:
        panel = figure.add_subplot(xlabel="actual TTFT, s", ylabel="predicted TTFT, s")
        low, high = pairs.min() / 1.1, pairs.max() * 1.1
        panel.hexbin(
            pairs[:, 0], pairs[:, 1], gridsize=40, bins="log", mincnt=1, xscale="log", yscale="log",
            extent=2 * (math.log10(low), math.log10(high)), cmap="Blues",
        )  # fmt: skip
        panel.plot([low, high], [low, high], color="grey", linestyle=":")
        label_axes(panel)

    note = f"{near_share(pairs):.0%} of {len(pairs):,} within {NEAR:.0%}"
    return draw_image(subject.title, draw, size_in=(4.2, 3.6), note=note)


def replicas(subjects: Sequence[NumberedResult]) -> Section:
    """Plots the number of machines that hold blocks of certain popularity ranks."""

    def drawn(subject: NumberedResult) -> Image:
        samples = subject.result.replicas

        def draw(figure: Any) -> None:
            panel = figure.add_subplot(xlabel="time, s", ylabel="machines")
            for rank in RANKS:
                held = [(s.at_s, s.replicas[rank - 1]) for s in samples if len(s.replicas) >= rank]
                if held:
                    panel.plot(*zip(*held, strict=True), drawstyle="steps-post", label=f"rank {rank}")
            panel.set_ylim(bottom=0)
            legend(figure)

        return draw_image(subject.title, draw, size_in=(4.2, 3.0))

    return Section(
        title="Replicas of popular blocks",
        note="Machines that hold the block of each rank of popularity (uses so far) at that moment.",
        images=tuple(drawn(s) for s in subjects if any(each.replicas for each in s.result.replicas)),
        is_narrow=True,
    )


def loads(subjects: Sequence[NumberedResult]) -> Section:
    """Plots the load of each instance: a row per instance over time."""
    return Section(
        title="Load of each instance",
        note="A row per instance, by the root of its load, since a few long queues would leave all others invisible.",
        images=tuple(_load_image(each) for each in subjects if each.result.instances),
    )


def _load_image(subject: NumberedResult) -> Image:
    samples = subject.result.instances
    kinds = instances_by_kind(samples)
    end_s = max(subject.result.duration_s, samples[-1].at_s) or 1.0
    heights = [min(max(0.14 * len(names), 0.5), 5.0) for names in kinds.values()]

    def draw(figure: Any) -> None:
        from matplotlib.colors import PowerNorm

        panels = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
        for panel, (kind, names) in zip(panels, kinds.items(), strict=True):
            table, what = load_table(samples, names)
            top = float(np.nanmax(table)) or 1.0
            shown = panel.imshow(
                table, aspect="auto", interpolation="none", cmap="Blues",
                norm=PowerNorm(0.5, vmin=0, vmax=top),
                extent=(0, end_s, len(names) - 0.5, -0.5),
            )  # fmt: skip
            step = math.ceil(len(names) / 35)
            panel.set_yticks(range(0, len(names), step), names[::step], fontsize=8)
            panel.set_title(f"{kind}: {what}", loc="left", fontsize=9)
            panel.grid(visible=False)
            figure.colorbar(shown, ax=panel, format=format_tick)
        panels[-1].set_xlabel("time, s")

    return draw_image(subject.title, draw, size_in=(WIDTH_IN, sum(heights) + 0.75 * len(kinds)))


def instances_by_kind(samples: Sequence[InstanceSample]) -> dict[str, list[str]]:
    """Returns instances by kind ("prefill-12" → "prefill"). Kinds are in order of appearance, instances by number."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        name = sample.instance_id
        kinds[re.sub(r"[-_.:/ ]*\d+$", "", name) or "instances"].add(name)
    return {kind: sorted(names, key=lambda name: (len(name), name)) for kind, names in kinds.items()}


def load_table(samples: Sequence[InstanceSample], names: Sequence[str]) -> tuple[Floats, str]:
    """Returns `[instance, time]` loads, NaN without a sample, and a description of them.

    The load is the predicted queue if instances predict one, as prefill machines do, otherwise the number of requests.
    """
    own = [sample for sample in samples if sample.instance_id in names]
    predicted = any(sample.predicted_queue_s > 0 for sample in own)
    column_of = {at: n for n, at in enumerate(sorted({sample.at_s for sample in samples}))}
    table = np.full((len(names), len(column_of)), np.nan)
    for sample in own:
        load = sample.predicted_queue_s if predicted else sample.queued + sample.running
        table[names.index(sample.instance_id), column_of[sample.at_s]] = load
    return table, "predicted queue, s" if predicted else "requests, waiting and running"
