"""Formats the Markdown tables: one per part, and the list of bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import table
from benchmarks.store.bars import Bar
from benchmarks.store.workload import OPS

VERDICTS = {None: "", True: "met", False: "**missed**"}


def speed_report(speed: Mapping[str, Any]) -> str:
    sizes: list[str] = speed["sizes"]
    tables = [
        _speed_table(speed["results"], sizes, figure, unit, form)
        for figure, unit, form in (
            ("gb_s", "GB/s", ".2f"),
            ("values_s", "values/s", ",.0f"),
            ("p50_us", "p50 of a call, µs", ",.0f"),
            ("p99_us", "p99 of a call, µs", ",.0f"),
        )
    ]
    lines = [f"Placement: {speed['placement']}; medians of {speed['rounds']} rounds."]
    lines += [f"Other processes used {speed['others_cores']:.2f} cores meanwhile."]
    for name, result in speed["results"].items():
        absent = {"in the end": result["absent"]} if result["absent"] else {}
        lines += [f"- {name}, {at}: {why}" for at, why in (result["errors"] | absent).items()]
    return "\n\n".join([*tables, "\n".join(lines)])


def _speed_table(results: Mapping[str, Any], sizes: Sequence[str], figure: str, unit: str, form: str) -> str:
    """Returns a table with a row per store, a column per size, and one for `exists`, except for GB/s."""
    rows = []
    for name, result in results.items():
        cells = [_both(result["cells"][size], figure, form) for size in sizes]
        exists = result["exists"]
        if figure != "gb_s":
            cells.append(format(exists[figure], form) if exists else "–")
        rows.append([name, *cells])
    last = [] if figure == "gb_s" else ["exists"]
    return table([f"{unit}, put / get", *sizes, *last], rows)


def _both(cell: Mapping[str, Any], figure: str, form: str) -> str:
    return " / ".join(format(cell[op][figure], form) if cell.get(op) else "–" for op in OPS)


def restart_report(restart: Mapping[str, Any]) -> str:
    hits = restart["replay"]
    rows = [
        ["on disk before, GiB", f"{restart['gib']:.1f} of {restart['num_values']:,} values"],
        ["put, GB/s", f"{restart['put_gb_s']:.2f}"],
        ["stopping, with what was only in memory, s", f"{restart['stop_s']:.1f}"],
        ["start to serving, s", f"{restart['serving_s']:.2f}"],
        ["start to the first hit, s", f"{restart['first_hit_s']:.2f}"],
        ["start to the full index, s", f"{restart['full_index_s']:.2f}"],
        ["values put / there before / found / read again / wrong", _found(restart)],
        [f"hit rate of {hits['trace']} before", f"{hits['before']:.4f}"],
        ["… as soon as it served", f"{hits['at_once']:.4f}"],
        ["… after the full index", f"{hits['after']:.4f}"],
    ]
    return table(("restart", ""), rows)


def _found(restart: Mapping[str, Any]) -> str:
    names = ("num_values", "num_before", "num_found", "num_read", "num_wrong")
    return " / ".join(f"{restart[name]:,}" for name in names)


def blocks_report(points: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        ("resident bytes/block", "resident_bytes", ".0f"),
        ("metadata bytes/block", "metadata_bytes", ".0f"),
        ("put µs/block", "put_us", ".1f"),
        ("lease + release of 16, µs", "lease_us", ".0f"),
        ("look-ups/s one by one", "find_s", ",.0f"),
        ("in batches of 64", "find_batch_s", ",.0f"),
    )
    rows = [[f"{p['blocks']:,}", p["policy"], *_values(p, [(key, form) for _, key, form in columns])] for p in points]
    return table(("blocks of one node", "policy", *(title for title, _, _ in columns)), rows)


def nodes_report(points: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        ("put/s", "put_s", ",.0f"),
        ("get/s", "get_s", ",.0f"),
        ("exists/s", "exists_s", ",.0f"),
        ("exists p50 µs", "exists_p50_us", ".0f"),
        ("cold connect ms", "connect_ms", ".0f"),
        ("first get ms", "first_get_ms", ".1f"),
        ("directory bytes/key", "directory_bytes_per_key", ".0f"),
        ("directory resident MiB", "directory_resident_mib", ".0f"),
    )
    rows = [[str(p["nodes"]), *_values(p, [(key, form) for _, key, form in columns])] for p in points]
    return table(("nodes", *(title for title, _, _ in columns)), rows)


def _values(point: Mapping[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    if "failed" in point:
        return [str(point["failed"]), *[""] * (len(columns) - 1)]
    return [format(point[key], form) for key, form in columns]


def bars_report(bars: Sequence[Bar]) -> str:
    rows = [[each["claim"], _reached(each), each["bar"], VERDICTS[each["met"]]] for each in bars]
    missed = sum(each["met"] is False for each in bars)
    return "\n".join([table(("bar", "reached", "asked", ""), rows), "", f"Bars missed: {missed}"])


def _reached(each: Bar) -> str:
    return "–" if each["measured"] is None else f"{each['measured']:.3g}"
