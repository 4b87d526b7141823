"""Results as JSON and back: `results.json`.

Rows are stored as columns (`{"arrived_s": […], "ttft_s": […]}`), which takes a third of the space and suits data
frames. Numbers that JSON lacks are strings: `"Infinity"`, `"NaN"`. Each result includes its summary for other programs;
reading ignores it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from protocol.errors import ConfigError
from traces.reports.summary import summary
from traces.simulator.results import (
    InstanceSample,
    ReplicaSample,
    RequestOutcome,
    SimulationResult,
)

FORMAT = 2

_ROWS = {"outcomes": RequestOutcome, "instances": InstanceSample, "replicas": ReplicaSample}
_RESULTS = TypeAdapter(list[SimulationResult])


def results_to_json(results: Sequence[SimulationResult]) -> str:
    """Returns results as JSON. Equal results give equal text. Numpy numbers are allowed."""
    whole = {"format": FORMAT, "results": [_result(each) for each in results]}
    text = to_json(whole, inf_nan_mode="strings", fallback=lambda number: number.item())
    return text.decode() + "\n"


def _result(result: SimulationResult) -> dict[str, Any]:
    stored = {field.name: getattr(result, field.name) for field in fields(result)}
    for name, row_type in _ROWS.items():
        stored[name] = {column.name: [getattr(row, column.name) for row in stored[name]] for column in fields(row_type)}
    return {"summary": summary(result), **stored}


def results_from_json(text: str) -> list[SimulationResult]:
    """Reads the output of `results_to_json`. Raises ConfigError for any other text."""
    try:
        whole = json.loads(text)
        if whole["format"] != FORMAT:
            raise ConfigError(f"the results are of format {whole['format']}; this reads {FORMAT}")
        for stored in whole["results"]:
            for name in _ROWS:
                rows = zip(*stored[name].values(), strict=True)
                stored[name] = [dict(zip(stored[name], row, strict=True)) for row in rows]
        return _RESULTS.validate_python(whole["results"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"these are no results of simulations: {error!r}") from error
