"""Every sampling parameter reaches vLLM or the logits processor, whichever part of an answer an engine generates."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

from moonserve.protocol.pb import common_pb2
from moonserve.protocol.request import CacheHints, Request, SamplingParams
from moonserve.vllm.serving.sampling import (
    EXTRA,
    WAYS,
    Way,
    engine_parameters,
    sampling_of_processor,
    scheduling_priority,
    seed_of_part,
    transfer_parameters,
)
from tests.prefill_worker.builders import make_request

_FULL = SamplingParams(
    max_tokens=10,
    min_tokens=4,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    seed=2**64 - 1,
    stop_token_ids=frozenset({7, 3}),
    num_logprobs=2,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    logit_bias={5: -1.5},
    grammar='start: "a"',
    bad_words=((1, 2), (3,)),
    num_prompt_logprobs=1,
)
_NAMES_OF_VLLM = {"num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}


def _request(sampling: SamplingParams, num_generated: int = 0) -> Request:
    request = make_request("r", range(20))
    tokens = (*request.token_ids, *range(num_generated))
    return replace(request, token_ids=tokens, num_prompt_tokens=20, sampling=sampling)


def test_every_field_of_the_message_has_a_way() -> None:
    assert set(WAYS) == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(WAYS) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way is Way.PASSED_ON])
def test_a_parameter_that_is_passed_on_changes_what_vllm_gets(name: str) -> None:
    plain = SamplingParams(max_tokens=10)
    given = [engine_parameters(_request(each), exact=False) for each in (plain, replace(plain, **_set(name)))]
    own = _NAMES_OF_VLLM.get(name, name)
    assert given[0][own] != given[1][own]


def _set(name: str) -> dict[str, Any]:
    return {name: getattr(_FULL, name)}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way is Way.WHOLE_ANSWER])
def test_a_parameter_of_the_whole_answer_goes_to_the_processor_with_all_the_others(name: str, exact: bool) -> None:
    sampling = SamplingParams(max_tokens=10, repetition_penalty=1.5, logit_bias={5: -1.5}, **_set(name))
    given = engine_parameters(_request(sampling, 3), exact=exact)
    part = given["extra_args"][EXTRA]
    assert sampling_of_processor(part) == sampling
    assert part["num_prompt_tokens"] == 20
    assert not {"repetition_penalty", "logit_bias", "presence_penalty", "frequency_penalty"} & given.keys()


def test_the_processor_gets_all_fields_unchanged() -> None:
    given = engine_parameters(_request(_FULL), exact=True)
    assert sampling_of_processor(given["extra_args"][EXTRA]) == _FULL
    assert given["extra_args"][EXTRA]["draws"]
    assert given["temperature"] == 0.0


def test_token_limits_are_less_what_was_generated() -> None:
    sampling = SamplingParams(max_tokens=10, min_tokens=4)
    assert _limits(engine_parameters(_request(sampling), exact=False)) == (10, 4)
    assert _limits(engine_parameters(_request(sampling, 3), exact=False)) == (7, 1)
    assert _limits(engine_parameters(_request(sampling, 6), exact=False)) == (4, 0)
    assert _limits(engine_parameters(_request(sampling), max_new_tokens=1, exact=False)) == (1, 1)


def _limits(given: dict[str, Any]) -> tuple[int, int]:
    return given["max_tokens"], given["min_tokens"]


def test_a_prompt_is_scored_only_before_the_first_token() -> None:
    sampling = SamplingParams(max_tokens=10, num_prompt_logprobs=2)
    assert engine_parameters(_request(sampling), exact=False)["prompt_logprobs"] == 2
    assert engine_parameters(_request(sampling, 1), exact=False)["prompt_logprobs"] is None


def test_parts_of_an_answer_have_seeds_of_their_own_that_torch_takes() -> None:
    seeds = {seed_of_part(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(50)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_requests_are_scheduled_by_priority_then_by_place() -> None:
    order = [(-(2**31), 0.0), (-1, 1e9), (0, -3.5), (0, 1.25), (0, 1.26), (1, -1e6), (2**31 - 1, 1e9)]
    numbers = list(itertools.starmap(scheduling_priority, order))
    assert numbers == sorted(set(numbers))
    assert all(-(2**63) <= number < 2**63 for number in numbers)


def test_greedy_requests_without_history_need_no_processor() -> None:
    given = engine_parameters(_request(SamplingParams(max_tokens=10, temperature=0.0)), exact=True)
    assert "extra_args" not in given


def test_hints_come_with_the_transfer_parameters_of_either_role() -> None:
    plain = make_request("r", range(20))
    hinted = replace(plain, cache_hints=CacheHints(return_within_s=9.0))
    assert transfer_parameters(plain, False, "") is None
    for is_prefill, given in ((True, ""), (False, '{"remote_port": 1}'), (False, "")):
        found = transfer_parameters(hinted, is_prefill, given) or {}
        assert CacheHints(**found.pop("cache_hints")) == hinted.cache_hints
        assert found == (transfer_parameters(plain, is_prefill, given) or {})
