"""The chunk that a decode step has room for: as large as fits, never none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.step_budget import LEAST_CHUNK, StepBudget
from tests.thoroughness import examples

DECODE = DecodeProfile(c0=0.0256, c1=1.1e-4, c2=4.07e-8)
A800 = PrefillProfile(c0=0.0, c1=1.15e-4, c2=7.3e-10)


def test_a_step_of_32_long_sequences_leaves_room_for_less_than_a_block_of_512() -> None:
    """44.8 ms of decoding under a target of 0.1 s: 55.2 ms are 415 tokens behind 12,000."""
    chunk = StepBudget(decode=DECODE, prefill=A800, most_step_s=0.1).chunk_tokens(0.0448, 12_000, 8_192)
    assert chunk == 415


def test_a_prompt_goes_on_where_decoding_takes_all_of_the_time() -> None:
    budget = StepBudget(decode=DECODE, prefill=A800, most_step_s=0.1)
    assert budget.chunk_tokens(0.2, 0, 8_192) == LEAST_CHUNK
    assert budget.chunk_tokens(0.2, 0, 3) == 3


@pytest.mark.parametrize("most_step_s", [0.0, -1.0, math.inf, math.nan])
def test_a_budget_is_a_time(most_step_s: float) -> None:
    with pytest.raises(InvalidRequest):
        StepBudget(decode=DECODE, prefill=A800, most_step_s=most_step_s)


@settings(max_examples=examples(200))
@given(
    c0=st.sampled_from([0.0, 0.005]),
    c1=st.sampled_from([0.0, 1e-4, 1e-3]),
    c2=st.sampled_from([0.0, 1e-9, 1e-7]),
    spent_s=st.floats(0.0, 0.5),
    num_done=st.integers(0, 100_000),
    most=st.integers(1, 10_000),
)
def test_a_chunk_is_the_largest_that_keeps_to_the_budget(
    c0: float, c1: float, c2: float, spent_s: float, num_done: int, most: int
) -> None:
    """One token more would not, or is not there; where even the least does not, it is the least."""
    budget = StepBudget(decode=DECODE, prefill=PrefillProfile(c0=c0, c1=c1, c2=c2), most_step_s=0.3)
    chunk = budget.chunk_tokens(spent_s, num_done, most)

    def step_s(num_tokens: int) -> float:
        return spent_s + budget.prefill.seconds(num_done + num_tokens, num_done)

    assert min(LEAST_CHUNK, most) <= chunk <= most
    if chunk > LEAST_CHUNK:
        assert step_s(chunk) <= 0.3 + 1e-9
    if chunk < most:
        assert step_s(chunk + 1) > 0.3 - 1e-9


@settings(max_examples=examples(100))
@given(
    num_seqs=st.integers(0, 64),
    context=st.integers(0, 1_000_000),
    prompts=st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 5_000)), max_size=5),
    most=st.integers(0, 8_192),
)
def test_several_prompts_share_what_there_is(
    num_seqs: int, context: int, prompts: list[tuple[int, int]], most: int
) -> None:
    """In order: only whole rests let others join, and only the first one may break the budget, by the least chunk."""
    budget = StepBudget(decode=DECODE, prefill=A800, most_step_s=0.1)
    chunks = budget.chunks(num_seqs, context, prompts, most)
    assert sum(chunks) <= most
    assert bool(chunks) == bool(prompts and most)
    parts = list(zip(prompts, chunks, strict=False))
    assert all(chunk == missing for (_, missing), chunk in parts[:-1])
    decode_s = DECODE.step_s(num_seqs, context) if num_seqs else 0.0
    step_s = decode_s + sum(A800.seconds(done + n, done) for (done, _), n in parts)
    if parts:
        done = parts[0][0][0]
        least_s = A800.seconds(done + LEAST_CHUNK, done)
        assert step_s <= max(0.1, decode_s + least_s) + 1e-9
