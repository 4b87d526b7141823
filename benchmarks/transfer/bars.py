"""Bars: the claimed ratios and the measured ones. Pure; works on the JSON's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.measure import median
from benchmarks.transfer.workload import KIB, MIB, SIZES

SHM, TCP = "moonserve shm", "moonserve tcp"
MEMCPY = ("memcpy", "memcpy huge pages")
RATIOS: tuple[tuple[str, tuple[str, ...], float, int], ...] = (
    (TCP, ("raw sockets",), 0.85, MIB),
    (TCP, ("mooncake tcp",), 1.3, 128 * KIB),
    (TCP, ("nixl tcp",), 1.0, 128 * KIB),
    (SHM, MEMCPY, 0.85, MIB),
    (SHM, ("nixl shm",), 1.0, MIB),
    (f"{TCP} + checksums", (TCP,), 0.8, MIB),
    (f"{SHM} + checksums", (SHM,), 0.6, MIB),
)
"""(contestant, rivals of which the best counts, least ratio, least block size)."""
LATENCIES_US = {SHM: 25.0, TCP: 90.0}

Results = Mapping[str, Mapping[str, Any]]


def bars(results: Results, sizes: Sequence[str]) -> list[dict[str, Any]]:
    return [*_ratio_bars(results, sizes), *_latency_bars(results)]


def _ratio_bars(results: Results, sizes: Sequence[str]) -> Iterator[dict[str, Any]]:
    for who, others, bar, from_bytes in RATIOS:
        others = tuple(other for other in others if other in results)
        if who not in results or not others:
            continue  # not selected for this run
        for size in sizes:
            block_bytes, blocks = SIZES[size]
            applies = blocks == 1 and block_bytes >= from_bytes
            for op in ("read", "write"):
                claim = f"{who} / {' or '.join(others)}, {size} {op}"
                asked = f"≥ {bar}" if applies else ""
                reached = _ratio(results, who, others, size, op)
                met = (reached is not None and reached >= bar) if applies else None
                if reached is None and _cell(results, who, size, op):
                    asked, met = "nothing to compare with", None
                yield _bar(claim, reached, asked, met)


def _latency_bars(results: Results) -> Iterator[dict[str, Any]]:
    for who, bar in LATENCIES_US.items():
        if who in results:
            latency = results[who]["latency"]
            reached = latency["p50_us"] if latency else None
            met = reached is not None and reached <= bar
            yield _bar(f"{who}, 64 KiB read p50, µs", reached, f"≤ {bar:.0f}", met)


def _bar(claim: str, reached: float | None, asked: str, met: bool | None) -> dict[str, Any]:
    """Returns one bar. `met` is None if nothing is required and the ratio is only informative."""
    return {"claim": claim, "measured": reached, "bar": asked, "met": met}


def _ratio(results: Results, who: str, others: Sequence[str], size: str, op: str) -> float | None:
    """Returns the median over rounds of the ratio to the best rival; None if either was not measured."""
    ours = _cell(results, who, size, op)
    rivals = [cell for other in others if (cell := _cell(results, other, size, op))]
    if ours is None or not rivals:
        return None
    best = max(rivals, key=lambda cell: float(cell["gb_s"]))
    pairs = zip(ours["gb_s_rounds"], best["gb_s_rounds"], strict=False)
    return median([a / b for a, b in pairs])


def _cell(results: Results, who: str, size: str, op: str) -> Mapping[str, Any] | None:
    cell: Mapping[str, Any] | None = results[who]["throughput"].get(size, {}).get(op)
    return cell
