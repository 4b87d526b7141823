"""Statistics of streams, interleaved rounds, the machine and the load of other processes, tables, JSON files."""

import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from moonserve.protocol.latency import Timeline, percentile


def machine() -> dict[str, Any]:
    """Returns what a report says about the machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def random_prompts(count: int, length: int, vocab_size: int, seed: str) -> list[list[int]]:
    """Returns `count` random prompts, different for every seed. They share no prefix, so that no cache helps."""
    rng = random.Random(seed)
    return [[rng.randrange(16, vocab_size) for _ in range(length)] for _ in range(count)]


def decode_throughput(timelines: Sequence[Timeline]) -> float:
    """Returns tokens per second while all streams decode at once: from the last first token to the first last token."""
    begin = max(t.token_at[0] for t in timelines)
    end = min(t.token_at[-1] for t in timelines)
    if end <= begin:
        raise ValueError("the streams never decoded at the same time: ask for more output tokens")
    tokens = sum(begin < at <= end for t in timelines for at in t.token_at)
    return tokens / (end - begin)


def total_throughput(timelines: Sequence[Timeline]) -> float:
    """Returns output tokens per second from the first arrival to the last token."""
    begin = min(t.arrived_at for t in timelines)
    end = max(t.token_at[-1] for t in timelines)
    return sum(len(t.token_at) for t in timelines) / (end - begin)


def latencies_ms(timelines: Sequence[Timeline]) -> dict[str, float]:
    """Returns percentiles of TTFT and of gaps between tokens over several streams."""
    ttft = [t.ttft_s * 1000 for t in timelines]
    gaps = [gap * 1000 for t in timelines for gap in t.gaps_s]
    return {
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p99_ms": percentile(ttft, 99),
        "tbt_p50_ms": percentile(gaps, 50),
        "tbt_p99_ms": percentile(gaps, 99),
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure over several runs."""
    return {name: median([row[name] for row in rows]) for name in rows[0]}


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    cells = [[_cell(value) for value in row] for row in rows]
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


# Interleaves contestants at every load, round by round, so that a busy neighbour disturbs all of them.

S = TypeVar("S")
L = TypeVar("L")


def interleaved(seats: Sequence[S], loads: Sequence[L], rounds: int, *, first: int = 0) -> Iterator[tuple[S, L]]:
    """Yields each seat at each load once per round. The first seat rotates from round to round. `first`: number of
    rounds measured before."""
    for number in range(first, rounds):
        begin = time.monotonic()
        shift = number % len(seats)
        for load in loads:
            for seat in (*seats[shift:], *seats[:shift]):
                yield seat, load
        report_progress(f"round {number + 1} of {rounds}: {time.monotonic() - begin:.0f} s")


def report_progress(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


# Measures the processor use of processes outside the benchmark.


class ForeignLoad:
    """Processor use of other processes since the creation of this object."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._others_s = _others_s()

    def others_cores(self) -> float:
        """Returns their mean number of busy cores. Call it after all of the benchmark's processes have ended."""
        return (_others_s() - self._others_s) / (time.monotonic() - self._since)


def _others_s() -> float:
    everybody = psutil.cpu_times()
    busy = sum(everybody) - everybody.idle - everybody.iowait - everybody.guest
    own = os.times()
    return busy - own.user - own.system - own.children_user - own.children_system
