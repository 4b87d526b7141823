"""Helpers of all benchmarks: prompts, throughput and latencies of streams, medians, tables, JSON files."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.timeline import Timeline, percentile


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
