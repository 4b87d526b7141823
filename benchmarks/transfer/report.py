"""Formats the table and the list of bars as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import table
from benchmarks.transfer.results import OPS

CPU_AT = "1 MiB"


def report(document: Mapping[str, Any]) -> str:
    sizes = list(document["in_flight"])
    rows = [_row(name, figures, sizes) for name, figures in document["results"].items()]
    headers = ["GB/s, read / write", *sizes, "64 KiB read p50 / p99 µs", f"CPU s/GB at {CPU_AT}"]
    in_flight = ", ".join(f"{size}: {count}" for size, count in document["in_flight"].items())
    lines = [table(headers, rows), "", f"Requests in flight: {in_flight}; latency one at a time."]
    lines += [f"Placement: {document['placement']}; medians of {document['rounds']} rounds.", ""]
    lines += [f"Other processes used {document['others_cores']:.2f} cores meanwhile.", ""]
    lines += [line for name, figures in document["results"].items() for line in _failures(name, figures)]
    missed = [bar["claim"] for bar in document["bars"] if bar["met"] is False]
    lines += ["", table(("bar", "reached", "asked", ""), [_bar(bar) for bar in document["bars"]])]
    lines += ["", f"Bars missed: {len(missed)}"]
    return "\n".join(lines)


def _row(name: str, figures: Mapping[str, Any], sizes: Sequence[str]) -> list[str]:
    if figures["absent"] and not any(figures["throughput"].values()):
        return [name, figures["absent"], *[""] * (len(sizes) + 1)]
    latency = figures["latency"]
    return [
        name,
        *[_both(figures, size, "gb_s") for size in sizes],
        f"{latency['p50_us']:.0f} / {latency['p99_us']:.0f}" if latency else "–",
        _both(figures, CPU_AT, "cpu_s_per_gb") if CPU_AT in sizes else "–",
    ]


def _both(figures: Mapping[str, Any], size: str, figure: str) -> str:
    cells = [figures["throughput"][size].get(op) for op in OPS]
    return " / ".join(f"{cell[figure]:.2f}" if cell else "–" for cell in cells)


def _failures(name: str, figures: Mapping[str, Any]) -> list[str]:
    absent = {"in the end": figures["absent"]} if figures["absent"] else {}
    return [f"- {name}, {at}: {why}" for at, why in (figures["errors"] | absent).items()]


def _bar(bar: Mapping[str, Any]) -> list[str]:
    verdict = {None: "", True: "met", False: "**missed**"}[bar["met"]]
    reached = "–" if bar["measured"] is None else f"{bar['measured']:.2f}"
    return [bar["claim"], reached, bar["bar"], verdict]
