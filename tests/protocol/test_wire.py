"""What a client wishes and what is found for it cross the wire unchanged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.prompt_logprobs import FLOAT, UINT, PromptLogprobs
from protocol.request import SamplingParams
from protocol.wire import (
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)


def found(num_tokens: int, num_top: int) -> PromptLogprobs:
    random = np.random.default_rng(num_tokens)
    shape = (num_tokens, num_top)
    return PromptLogprobs(
        logprobs=random.normal(size=num_tokens).astype(FLOAT),
        ranks=random.integers(1, 2**32, num_tokens).astype(UINT),
        top_ids=random.integers(0, 2**32, shape).astype(UINT),
        top_logprobs=random.normal(size=shape).astype(FLOAT),
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("num_top", [0, 3])
def test_log_probabilities_of_prompts_arrive_as_they_were(num_tokens: int, num_top: int) -> None:
    sent = found(num_tokens, num_top)
    arrived = prompt_logprobs_from_wire(prompt_logprobs_to_wire(sent))
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        one, other = getattr(sent, name), getattr(arrived, name)
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def test_arrays_of_other_sizes_are_refused() -> None:
    message = prompt_logprobs_to_wire(found(4, 2))
    message.top_ids = message.top_ids[:-4]
    with pytest.raises(ValueError, match="reshape"):
        prompt_logprobs_from_wire(message)


WORDS = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4).map(tuple), max_size=3)


@given(words=WORDS, wanted=st.none() | st.integers(0, 20))
def test_sampling_parameters_arrive_as_they_were(
    words: list[tuple[int, ...]], wanted: int | None
) -> None:
    sampling = SamplingParams(
        max_tokens=9, num_logprobs=wanted, num_prompt_logprobs=wanted, bad_words=tuple(words)
    )
    assert sampling_from_wire(sampling_to_wire(sampling)) == sampling
