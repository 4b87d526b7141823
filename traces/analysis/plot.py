"""The statistics as one PNG of six panels. matplotlib comes with the extra `train`; without it, the install line."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from traces.output import writing

INSTALL = "pip install 'moonserve[plots]'"


def require_matplotlib() -> None:
    """Raises ConfigError with the install line; called before anything is computed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: {INSTALL}")


def plot_statistics(statistics: Mapping[str, Any], name: str, path: Path) -> None:
    """Writes the PNG. Raises ConfigError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7))
    panels = figure.subplots(2, 3)
    _lengths(panels[0][0], statistics)
    _rate(panels[0][1], statistics["arrivals"])
    _curve(panels[0][2], statistics["lru"])
    _popularity(panels[1][0], statistics["prefixes"])
    _branching(panels[1][1], statistics["prefixes"])
    _gaps(panels[1][2], statistics)
    figure.suptitle(f"{name}: {statistics['num_requests']:,} requests")
    figure.tight_layout()
    with writing(f"the plot {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, format="png")


def _percentiles(panel: Any, figures: Mapping[str, float | None], label: str) -> None:
    points = [(value, int(key[1:])) for key, value in figures.items() if key[0] == "p" and value]
    panel.plot(
        [value for value, _ in points], [percent for _, percent in points], "o-", label=label
    )


def _lengths(panel: Any, statistics: Mapping[str, Any]) -> None:
    for name in ("input_length", "output_length"):
        _percentiles(panel, statistics[name], name)
    panel.set(xscale="log", xlabel="tokens", ylabel="percent of requests")
    panel.legend(fontsize="small")


def _rate(panel: Any, arrivals: Mapping[str, Any]) -> None:
    window_s = arrivals["window_s"]
    panel.step(
        [index * window_s for index in range(len(arrivals["rates"]))],
        arrivals["rates"],
        where="post",
    )
    panel.set(xlabel="seconds", ylabel="requests/s")
    panel.set_ylim(bottom=0)


def _curve(panel: Any, lru: Mapping[str, Any]) -> None:
    points = [point for point in lru["curve"] if point["capacity_tokens"] is not None]
    panel.plot(
        [point["capacity_tokens"] for point in points],
        [point["hit_ratio"] for point in points], "o-", label="LRU",
    )  # fmt: skip
    panel.axhline(lru["curve"][-1]["hit_ratio"], color="grey", linestyle=":", label="unlimited")
    panel.set(xscale="log", xlabel="cache, tokens", ylabel="hits / prompt tokens")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")


def _popularity(panel: Any, prefixes: Mapping[str, Any]) -> None:
    points = prefixes["popularity"]
    panel.plot([point["rank"] for point in points], [point["uses"] for point in points], "o-")
    panel.set(xscale="log", yscale="log", xlabel="rank of block", ylabel="uses")


def _branching(panel: Any, prefixes: Mapping[str, Any]) -> None:
    rows = prefixes["branching"]
    for name in ("requests", "blocks"):
        panel.plot([row["depth"] for row in rows], [row[name] for row in rows], "o-", label=name)
    panel.set(yscale="log", xlabel="depth, blocks", ylabel="that reach it")
    panel.legend(fontsize="small")


def _gaps(panel: Any, statistics: Mapping[str, Any]) -> None:
    _percentiles(panel, statistics["prefixes"]["reuse_s"], "between uses of a block")
    _percentiles(panel, statistics["sessions"]["turn_gap_s"], "between turns")
    panel.set(xscale="log", xlabel="seconds", ylabel="percent")
    if panel.lines:
        panel.legend(fontsize="small")
