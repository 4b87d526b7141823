"""`moonserve traces analyze TRACE`: prints statistics of a trace as tables and writes them as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option, run_command
from moonserve.traces.format import read_checked
from moonserve.traces.output import text_table, write_text
from moonserve.traces.workload.statistics import CAPACITIES_TOKENS, analyze

# Formats trace statistics as tables for a terminal. Converts units and computes nothing else.

_COLUMNS = ("mean", "p10", "p50", "p90", "p99", "max")


def format_statistics(statistics: Mapping[str, Any], name: str) -> str:
    """Returns the output of `moonserve traces analyze`."""
    parts = [
        _summary(statistics, name),
        _spreads(statistics),
        _arrivals(statistics["arrivals"]),
        _curve(statistics["lru"]),
        _sharing(statistics["prefixes"]),
        _sessions(statistics["sessions"]),
    ]
    return "\n\n".join(parts)


def _summary(statistics: Mapping[str, Any], name: str) -> str:
    """Returns the trace's row of table 2 in FAST'25."""
    return "\n".join(
        [
            f"trace         {name}",
            f"requests      {statistics['num_requests']:>10,}",
            f"mean input    {statistics['input_length']['mean']:>10,.0f} tokens",
            f"mean output   {statistics['output_length']['mean']:>10,.0f} tokens",
            f"cache ratio   {statistics['cache_ratio']:>10.1%} of prompt tokens, unlimited cache",
        ]
    )


def _spreads(statistics: Mapping[str, Any]) -> str:
    rows = [
        ("input tokens", statistics["input_length"], ",.0f"),
        ("output tokens", statistics["output_length"], ",.0f"),
        ("blocks a prompt", statistics["prefixes"]["chain_blocks"], ",.0f"),
        ("arrival gap, s", statistics["arrivals"]["gap_s"], ",.3f"),
        ("requests/s", statistics["arrivals"]["window_rate"], ",.2f"),
        ("block reuse, s", statistics["prefixes"]["reuse_s"], ",.1f"),
        ("turn gap, s", statistics["sessions"]["turn_gap_s"], ",.1f"),
        ("turn new tokens", statistics["sessions"]["turn_new_tokens"], ",.0f"),
        ("turns a session", statistics["sessions"]["turns"], ",.2f"),
    ]
    cells = [[label, *(_cell(figures[column], style) for column in _COLUMNS)] for label, figures, style in rows]
    return text_table(["", *_COLUMNS], cells)


def _arrivals(arrivals: Mapping[str, Any]) -> str:
    dispersion = "  ".join(f"{window} {_cell(value, '.2f')}" for window, value in arrivals["dispersion"].items())
    return "\n".join(
        [
            f"duration      {arrivals['duration_s']:>10,.1f} s, "
            f"{_cell(arrivals['mean_rate'], ',.2f')} requests/s; busiest window of "
            f"{arrivals['window_s']:g} s {_cell(arrivals['peak_to_mean'], '.2f')} × the mean",
            f"burstiness    gaps {_cell(arrivals['gap_cv'], '.2f')} (deviation / mean); "
            f"counts {dispersion} (variance / mean; Poisson: 1)",
        ]
    )


def _curve(lru: Mapping[str, Any]) -> str:
    ideal = lru["curve"][-1]["hit_ratio"]
    rows = [
        [
            _capacity(point["capacity_tokens"]),
            f"{point['hit_ratio']:.3f}",
            f"{point['hit_ratio'] / ideal:.0%}" if ideal else "-",
        ]
        for point in lru["curve"]
    ]
    distances = lru["reuse_distance_tokens"]
    text = "  ".join(f"{name} {_cell(distances[name], ',')}" for name in ("p10", "p50", "p90", "p99"))
    table = text_table(["LRU cache, tokens", "hit ratio", "of ideal"], rows)
    return f"{table}\nreuse distance, distinct tokens between uses: {text}"


def _sharing(prefixes: Mapping[str, Any]) -> str:
    ranks = "  ".join(f"{point['rank']}: {point['uses']:,}" for point in prefixes["popularity"][::4])
    return (
        f"blocks        {prefixes['num_blocks']:>10,}, used once {prefixes['used_once_share']:.1%}\n"
        f"popularity    uses by rank  {ranks}"
    )


def _sessions(sessions: Mapping[str, Any]) -> str:
    return (
        f"sessions      {sessions['num_sessions']:>10,}; {sessions['extending_share']:.1%} of "
        "requests extend an earlier prompt"
    )


def _capacity(tokens: int | None) -> str:
    return "unlimited" if tokens is None else f"{tokens:,}"


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """Options of `moonserve traces analyze`."""

    trace: str = option(help="trace file, JSON lines; also as the first argument")
    limit: int | None = option(None, help="only this many requests, the first ones")
    window_s: float = option(60.0, help="seconds per window of the rate over time")
    capacities: tuple[str, ...] = option(
        tuple(map(str, CAPACITIES_TOKENS)), help="cache sizes of the hit curve, in tokens"
    )
    json: str | None = option(None, help="write the statistics as JSON to this file")


def main(argv: Sequence[str]) -> int:
    """Runs the command with `argv`, the arguments after `analyze`. The first one may be the trace."""
    return run_command(AnalyzeConfig, run, argv, prog="moonserve traces analyze", positional="--trace")


def run(config: AnalyzeConfig) -> int:
    """Prints and writes the statistics and returns the exit code. Raises ConfigError."""
    capacities = _check(config)
    path = Path(config.trace)
    statistics = analyze(read_checked(path, config.limit), window_s=config.window_s, capacities_tokens=capacities)
    print(format_statistics(statistics, path.name))
    if config.json:
        text = json.dumps({"trace": path.name, **statistics}, indent=2)
        write_text(Path(config.json), text + "\n")
    return 0


def _check(config: AnalyzeConfig) -> list[int]:
    """Returns the capacities as sorted numbers. Raises ConfigError for invalid options."""
    if config.limit is not None and config.limit < 1:
        raise ConfigError("--limit must be at least 1")
    if not 0 < config.window_s < float("inf"):
        raise ConfigError("--window-s must be above 0")
    try:
        capacities = sorted({int(each) for each in config.capacities})
    except ValueError as error:
        raise ConfigError(f"--capacities takes numbers of tokens: {error}") from error
    if not capacities or capacities[0] < 1:
        raise ConfigError("--capacities takes numbers of tokens from 1 up, with commas between")
    return capacities
