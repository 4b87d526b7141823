"""`results.json` holds all of a result, is JSON that any reader takes, and is refused when it is not ours."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from tests.traces.reports.made_up import made_up, outcome, rejected, result
from traces.reports.saved import results_from_json, results_to_json
from traces.simulator.results import (
    End,
    InstanceSample,
    ReplicaSample,
    RequestOutcome,
    SimulationResult,
)

seconds = st.floats(allow_nan=False)
maybe = st.none() | seconds
counts = st.integers(0, 2**53)
outcomes = st.builds(
    RequestOutcome,
    index=counts, arrived_s=seconds, input_length=counts, output_length=counts,
    end=st.sampled_from(End), reason=st.text(), prefill=st.text(), decode=st.text(),
    cached_tokens=counts, predicted_ttft_s=seconds, ttft_s=maybe, tbt_s=maybe, mean_gap_s=maybe,
    finished_s=maybe,
)  # fmt: skip
instances = st.builds(
    InstanceSample,
    at_s=seconds, instance_id=st.text(), queued=counts, running=counts, context_tokens=counts,
    predicted_queue_s=seconds,
)  # fmt: skip
replicas = st.builds(ReplicaSample, at_s=seconds, replicas=st.lists(counts, max_size=4).map(tuple))
results = st.builds(
    SimulationResult,
    name=st.text(), outcomes=st.lists(outcomes, max_size=4).map(tuple), ttft_slo_s=seconds,
    tbt_slo_s=seconds, duration_s=st.floats(0.001, 1e6), wall_s=seconds,
    instances=st.lists(instances, max_size=3).map(tuple),
    replicas=st.lists(replicas, max_size=3).map(tuple),
    counters=st.dictionaries(st.text(), seconds, max_size=3),
)  # fmt: skip


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@given(st.lists(results, max_size=3))
def test_what_was_written_is_read_back_equal(given_results: list[SimulationResult]) -> None:
    """Infinite numbers and any text included; NaN is left to the next test, being unequal to itself."""
    text = results_to_json(given_results)
    assert results_from_json(text) == given_results
    json.loads(text, parse_constant=no_constant)


def test_nan_and_numbers_of_numpy_are_written_as_well() -> None:
    odd = outcome(0, predicted_ttft_s=math.nan, cached_tokens=np.int64(7), ttft_s=np.float64(0.5))
    (back,) = results_from_json(results_to_json([result("odd", odd)]))
    assert math.isnan(back.outcomes[0].predicted_ttft_s)
    assert back.outcomes[0].cached_tokens == 7
    assert back.outcomes[0].ttft_s == 0.5


def test_rows_are_columns_and_what_an_older_program_did_not_write_has_its_default() -> None:
    whole = json.loads(results_to_json([result("r", outcome(0), rejected(1), wall_s=3.0)]))
    (stored,) = whole["results"]
    assert stored["summary"]["rejected"] == 1
    assert stored["outcomes"]["ttft_s"] == [1.0, None]
    assert stored["outcomes"]["end"] == ["completed", "rejected"]
    del stored["wall_s"], stored["outcomes"]["load_s"]
    assert results_from_json(json.dumps(whole)) == [result("r", outcome(0), rejected(1))]


def test_what_is_not_ours_is_refused() -> None:
    good = json.loads(results_to_json([made_up("m", num_requests=2)]))
    ragged = json.loads(json.dumps(good))
    ragged["results"][0]["outcomes"]["index"].pop()
    for text in ("{", "[]", "{}", '{"format": 2, "results": [{}]}', json.dumps(ragged)):
        with pytest.raises(ConfigError, match="these are no results"):
            results_from_json(text)
    with pytest.raises(ConfigError, match="of format 1; this reads 2"):
        results_from_json(json.dumps(good | {"format": 1}))
