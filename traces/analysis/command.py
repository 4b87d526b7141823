"""`moonserve traces analyze TRACE`: prints statistics of a trace as tables and writes them as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.config import option, run_command
from protocol.errors import ConfigError
from traces.analysis.statistics import CAPACITIES_TOKENS, analyze
from traces.analysis.tables import format_statistics
from traces.format import read_checked
from traces.output import write_text

PROG = "moonserve traces analyze"


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
    return run_command(AnalyzeConfig, run, argv, prog=PROG, positional="--trace")


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
