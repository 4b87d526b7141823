"""Reproduced figures as JSON: what the page shows, for other programs. Equal findings give equal text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from traces.reproduction.figure import Figure, Finding, Row, Subject

FORMAT = "moonserve reproduction 1"


def to_json(subject: Subject, found: Sequence[tuple[Figure, Finding]], *, quick: bool) -> str:
    """Numbers that JSON does not have are null."""
    whole = {
        "format": FORMAT,
        "trace": subject.name,
        "num_requests": len(subject.records),
        "quick": quick,
        "figures": [_figure(subject, figure, finding) for figure, finding in found],
    }
    return json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _figure(subject: Subject, figure: Figure, finding: Finding) -> dict[str, Any]:
    return {
        "name": figure.name,
        "title": figure.title,
        "setting": figure.setting,
        "missing": figure.missing(subject),
        "rows": [_row(row) for row in finding.rows],
        "claims": [asdict(claim) for claim in finding.claims],
        "why": finding.why,
        "plots": [_finite(asdict(plot)) for plot in finding.plots],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        str(name): _finite(value) for name, value in {**asdict(row), "ratio": row.ratio}.items()
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
