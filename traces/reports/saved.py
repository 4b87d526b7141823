"""Results as JSON and back: `results.json`, from which the page can be drawn again.

Rows are stored as columns (`{"arrived_s": […], "ttft_s": […]}`), which is a third of the size and what data frames
read. Numbers that JSON does not have (infinities, NaN) are objects: `{"float": "inf"}`. Each result has its summary
beside it for other programs; reading ignores it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from traces.reports.summary import summary
from traces.simulator.results import (
    End,
    InstanceSample,
    ReplicaSample,
    RequestOutcome,
    SimulationResult,
)

FORMAT = 1

_ROWS = {"outcomes": RequestOutcome, "instances": InstanceSample, "replicas": ReplicaSample}


def results_to_json(results: Sequence[SimulationResult]) -> str:
    """Equal results give equal text."""
    whole = {"format": FORMAT, "results": [_result(each) for each in results]}
    return json.dumps(whole, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def results_from_json(text: str) -> list[SimulationResult]:
    """Raises ConfigError for what `results_to_json` did not write."""
    try:
        whole = json.loads(text)
        if whole["format"] != FORMAT:
            raise ConfigError(f"the results are of format {whole['format']}; this reads {FORMAT}")
        return [_read_result(each) for each in whole["results"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"these are no results of simulations: {error!r}") from error


def read_results(path: Path) -> list[SimulationResult]:
    """Raises ConfigError that names the file."""
    try:
        return results_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _result(result: SimulationResult) -> dict[str, Any]:
    stored: dict[str, Any] = {"summary": _plain(summary(result))}
    for field in fields(SimulationResult):
        value = getattr(result, field.name)
        if field.name in _ROWS:
            value = {
                column.name: [getattr(row, column.name) for row in value]
                for column in fields(_ROWS[field.name])
            }
        stored[field.name] = _plain(value)
    return stored


def _plain(value: Any) -> Any:
    """What JSON has. Numbers may be numpy's."""
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "items"):
        return {key: _plain(each) for key, each in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _read_result(stored: dict[str, Any]) -> SimulationResult:
    names = [field.name for field in fields(SimulationResult) if field.name in stored]
    known = {name: stored[name] for name in names}  # the others keep their defaults
    for name, row_type in _ROWS.items():
        known[name] = _read_rows(row_type, known[name])
    counters = {key: _number(each) for key, each in known.pop("counters").items()}
    return SimulationResult(
        counters=counters, **{name: _number(each) for name, each in known.items()}
    )


def _read_rows(row_type: type, columns: dict[str, list[Any]]) -> tuple[Any, ...]:
    names = [field.name for field in fields(row_type) if field.name in columns]
    values = [[_cell(name, each) for each in columns[name]] for name in names]
    return tuple(
        row_type(**dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)
    )


def _cell(name: str, value: Any) -> Any:
    if name == "end":
        return End(value)
    return tuple(value) if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    return float(value["float"]) if isinstance(value, dict) else value
