"""Runs the parts of `make bench-store` by name. Each returns its figures, its table and its bars.

A failed part reports the reason and does not affect the others. Parts that are separate benchmarks run in their own
process; this module passes their options and reads their results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.store import growth_blocks, growth_nodes, replay, restart, speed
from benchmarks.store.bars import Bar, disk_bars, hit_ratio_bars, metadata_bars
from benchmarks.store.contestants import Contestant
from benchmarks.store.report import blocks_report, nodes_report, restart_report, speed_report
from benchmarks.transfer.pair import ContestantError, Placement

OTHER_TIMEOUT_S = 1_200.0
QUICK_DISK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options from the command line."""

    quick: bool
    full: bool
    rounds: int
    min_s: float
    sizes: Sequence[str]
    contestants: Sequence[Contestant]
    placement: Placement
    gib: float | None
    folder: Path
    trace: Path
    requests: int
    plots: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    title: str
    figures: dict[str, Any]
    table: str
    bars: list[Bar] = field(default_factory=list)


def run(name: str, options: Options) -> Part:
    """Runs a part. An exception becomes the content of the returned part."""
    begin = time.monotonic()
    try:
        return PARTS[name](options)
    except Exception as error:  # the other parts keep their figures
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        return Part(title=name, figures={"failed": why}, table=f"Failed: {why}")
    finally:
        print(f"· {name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _speed(options: Options) -> Part:
    figures, bars = speed.measure(
        options.contestants,
        options.sizes,
        rounds=options.rounds,
        min_s=options.min_s,
        placement=options.placement,
    )
    title = "Put, get and exists beside other stores"
    return Part(title=title, figures=figures, table=speed_report(figures), bars=bars)


def _disk(options: Options) -> Part:
    quick = ["--rounds", "1", "--bytes", str(QUICK_DISK_BYTES)]
    rounds = quick if options.quick else ["--rounds", str(options.rounds)]
    table, figures = _other("benchmarks.store_disk", *rounds, "--folder", str(options.folder))
    title = "The SSD tier beside fio"
    return Part(title=title, figures=figures, table=table, bars=disk_bars(figures))


def _restart(options: Options) -> Part:
    gib = restart.default_gib(options.folder) if options.gib is None else options.gib
    prompts = replay.prompts(options.trace, options.requests)
    figures, bars = restart.measure(options.folder, gib, prompts)
    return Part(title="Restart", figures=figures, table=restart_report(figures), bars=bars)


def _hits(options: Options) -> Part:
    if not options.trace.exists():
        raise FileNotFoundError(f"no trace at {options.trace} (moonserve traces fetch)")
    arguments = [str(options.trace)]
    if options.quick:  # too few requests to judge the bars
        arguments += ["--limit", "2000", "--capacities", "3000000"]
    if options.plots:
        arguments += ["--plot", str(options.plots / "store-hit-ratio.png")]
    table, figures = _other("benchmarks.store_hit_ratio", *arguments)
    bars = [] if options.quick else hit_ratio_bars(figures["points"])
    return Part(title="Hit ratio against capacity", figures=figures, table=table, bars=bars)


def _blocks(options: Options) -> Part:
    points = growth_blocks.measure(growth_blocks.choice(quick=options.quick, full=options.full))
    title = "Growth with the blocks of one node"
    figures = {"points": points}
    return Part(title=title, figures=figures, table=blocks_report(points), bars=metadata_bars(points))


def _nodes(options: Options) -> Part:
    counts = growth_nodes.QUICK_COUNTS if options.quick else growth_nodes.COUNTS
    points = growth_nodes.measure(counts)
    title = "Growth with the nodes"
    return Part(title=title, figures={"points": points}, table=nodes_report(points))


def _directory(options: Options) -> Part:
    blocks = ["10000", "100000"] if options.quick else ["10000", "100000", "1000000"]
    blocks += ["10000000"] if options.full else []
    rounds = ["--rounds", str(options.rounds)]
    table, figures = _other("benchmarks.store_directory", *rounds, "--blocks", *blocks)
    return Part(title="Growth of the directory", figures=figures, table=table)


PARTS: dict[str, Callable[[Options], Part]] = {
    "speed": _speed,
    "disk": _disk,
    "restart": _restart,
    "hits": _hits,
    "blocks": _blocks,
    "nodes": _nodes,
    "directory": _directory,
}


def _other(module: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Runs a separate benchmark; returns its table and its JSON. Missed bars do not count as a failed run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", module, *arguments, "--json", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=OTHER_TIMEOUT_S)
        if not path.exists():
            raise ContestantError(f"{module} ended with {done.returncode} and no figures")
        figures: dict[str, Any] = json.loads(path.read_text())
        return done.stdout.strip(), figures
