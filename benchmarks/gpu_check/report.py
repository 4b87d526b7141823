"""Formats the results as a table for people and as a JSON document for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_check.bench import Ceilings
from benchmarks.gpu_check.rows import Row
from benchmarks.measure import table


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped"


def as_table(machine: Mapping[str, str], ceilings: Ceilings, rows: Sequence[Row]) -> str:
    lines = [f"- {name}: {value}" for name, value in machine.items()]
    lines.append(
        f"- reached here: copies {ceilings.copy_bytes_per_s / 1e9:,.0f} GB/s (read and written), "
        f"bfloat16 products {ceilings.flops_per_s / 1e12:,.1f} TFLOP/s"
    )
    cells = [(row.name, row.status, row.found, row.asked, row.reason) for row in rows]
    headers = ("what", "", "found", "asked", "why")
    return "\n".join((*lines, "", table(headers, cells), "", summary(rows)))


def as_document(machine: Mapping[str, str], ceilings: Ceilings, rows: Sequence[Row], taken_s: float) -> dict[str, Any]:
    return {
        "machine": dict(machine),
        "ceilings": asdict(ceilings),
        "rows": [asdict(row) for row in rows],
        "seconds": taken_s,
    }
