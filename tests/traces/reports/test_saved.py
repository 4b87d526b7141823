"""Tests of `results.json`: it holds complete results in standard JSON, and foreign files are refused."""

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.errors import ConfigError
from moonserve.traces.simulator import results
from tests.traces.reports.made_up import made_up, outcome, rejected, result

seconds = st.floats(allow_nan=False)
counts = st.integers(0, 2**53)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: counts,
    float: seconds,
    float | None: st.none() | seconds,
    str: st.text(),
    results.End: st.sampled_from(results.End),
    tuple[int, ...]: st.lists(counts, max_size=4).map(tuple),
}


def rows_of(row: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    each = st.builds(row, **{field.name: BY_TYPE[field.type] for field in fields(row)})
    return st.lists(each, max_size=4).map(tuple)


RESULTS = st.builds(
    results.SimulationResult,
    name=st.text(),
    outcomes=rows_of(results.RequestOutcome),
    ttft_slo_s=seconds,
    tbt_slo_s=seconds,
    duration_s=st.floats(0.001, 1e6),
    wall_s=seconds,
    instances=rows_of(results.InstanceSample),
    replicas=rows_of(results.ReplicaSample),
    counters=st.dictionaries(st.text(), seconds, max_size=3),
)


@given(st.lists(RESULTS, max_size=3))
def test_results_are_read_back_equal(given_results: list[results.SimulationResult]) -> None:
    """Infinite numbers and any text are read back too. NaN is in the next test, since it is unequal to itself."""
    text = results.results_to_json(given_results)
    assert results.results_from_json(text) == given_results
    json.loads(text, parse_constant=pytest.fail)  # Infinity and NaN are not valid JSON


def test_nan_and_numbers_of_numpy_are_written_as_well() -> None:
    odd = outcome(0, predicted_ttft_s=math.nan, cached_tokens=np.int64(7), ttft_s=np.float64(0.5))
    (back,) = results.results_from_json(results.results_to_json([result("odd", odd)]))
    (one,) = back.outcomes
    assert math.isnan(one.predicted_ttft_s)
    assert (one.cached_tokens, one.ttft_s) == (7, 0.5)


def test_rows_are_columns_and_what_an_older_program_did_not_write_has_its_default() -> None:
    whole = json.loads(results.results_to_json([result("r", outcome(0), rejected(1), wall_s=3.0)]))
    (stored,) = whole["results"]
    assert stored["summary"]["rejected"] == 1
    assert stored["outcomes"]["ttft_s"] == [1.0, None]
    assert stored["outcomes"]["end"] == ["completed", "rejected"]
    del stored["wall_s"], stored["outcomes"]["load_s"]
    assert results.results_from_json(json.dumps(whole)) == [result("r", outcome(0), rejected(1))]


def test_other_json_is_refused() -> None:
    good = json.loads(results.results_to_json([made_up("m", num_requests=2)]))
    ragged = json.loads(json.dumps(good))
    ragged["results"][0]["outcomes"]["index"].pop()
    for text in ("{", "[]", "{}", '{"format": 2, "results": [{}]}', json.dumps(ragged)):
        with pytest.raises(ConfigError, match="these are no results"):
            results.results_from_json(text)
    with pytest.raises(ConfigError, match="of format 1; this reads 2"):
        results.results_from_json(json.dumps(good | {"format": 1}))
