"""Prompt lookup, the length of drafts, and steps with drafts: they give the same tokens in fewer steps."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.decode_worker.config import AllotmentConfig, DecodeConfig
from moonserve.decode_worker.decisions.speculation import PromptLookup, Speculation, StepTokens
from moonserve.engine.kernels.selector import FEW_TOKENS, exact_rows
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import FinishReason
from moonserve.protocol.step_time import DecodeProfile
from tests.decode_worker.driver import ALWAYS, BLOCK_SIZE, Driver, foretelling, next_token, request_of
from tests.thoroughness import examples

words = st.lists(st.integers(0, 2), min_size=1, max_size=30)
profiles = st.builds(DecodeProfile, c0=st.floats(0.0, 1.0), c1=st.floats(0.001, 1.0), c2=st.floats(0.0, 0.001))
rates = st.floats(0.0, 1.0)


# -- lookup


def looked_up(tokens: Sequence[int], settings: Speculation) -> list[int]:
    """Returns the draft by trying every end and every earlier place."""
    for length in range(settings.lookup_max, settings.lookup_min - 1, -1):
        end = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == end and len(end) == length:
                extended = list(tokens)
                for at in range(settings.num_tokens):
                    extended.append(extended[start + length + at])
                return extended[len(tokens) :]
    return []


@settings(max_examples=examples(1_000), deadline=None)
@given(words, st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(1, 30)))
def test_a_draft_is_what_followed_the_latest_occurrence_of_the_longest_end(
    tokens: list[int], one: int, other: int, num_tokens: int, cuts: list[int]
) -> None:
    """It does not depend on the calls before, which have seen a beginning of the tokens."""
    wish = replace(ALWAYS, num_tokens=num_tokens, lookup_min=min(one, other), lookup_max=max(one, other))
    lookup = PromptLookup()
    for cut in sorted(cuts):
        assert lookup.draft(tokens[:cut], wish) == looked_up(tokens[:cut], wish)
        assert 0.0 <= lookup.rate <= 1.0
    assert lookup.draft(tokens, wish) == looked_up(tokens, wish)


def test_the_rate_follows_guesses_that_no_row_was_spent_on() -> None:
    lookup, tokens = PromptLookup(), [1, 2, 3]
    for token in (1, 2, 3) * 6:
        lookup.draft(tokens, ALWAYS)
        tokens.append(token)
    lookup.draft(tokens, ALWAYS)
    repeating = lookup.rate
    assert repeating > 0.9
    for token in range(10, 16):  # 1 is followed by another token each time
        for each in (1, token):
            tokens.append(each)
            lookup.draft(tokens, ALWAYS)
    assert lookup.rate < 0.5 * repeating


# -- length


@given(profiles, st.integers(1, 64), st.integers(1, 10_000), rates, st.integers(0, 16))
def test_a_draft_never_lowers_the_expected_tokens_per_second(
    profile: DecodeProfile, num_seqs: int, context: int, rate: float, most: int
) -> None:
    """If a row costs at most half of a lone step, as it does with native kernels."""
    profile = replace(profile, c0=profile.c0 + profile.c1 + profile.c2 * context)
    step = StepTokens(profile, num_seqs, num_seqs * context)
    length = step.add(rate, context, most)
    assert 0 <= length <= most
    seconds = profile.step_s(num_seqs, num_seqs * context)
    gained = sum(rate**place for place in range(1, length + 1))
    row_s = profile.c1 + profile.c2 * context
    assert (num_seqs + gained) / (seconds + length * row_s) >= num_seqs / seconds * (1 - 1e-9)
    assert length == 0 or rate > 0.0


@given(profiles, st.integers(1, 32), rates, rates)
def test_drafts_are_longer_at_higher_rates_and_not_longer_in_larger_batches(
    profile: DecodeProfile, num_seqs: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    alone, among = StepTokens(profile, 1, 100), StepTokens(profile, num_seqs, num_seqs * 100)
    assert StepTokens(profile, 1, 100).add(low, 100, 16) <= alone.add(high, 100, 16)
    assert among.add(low, 100, 1) <= StepTokens(profile, 1, 100).add(low, 100, 1)


# -- steps


def test_right_drafts_give_the_same_tokens_in_fewer_steps() -> None:
    plain, drafting = Driver(), Driver(speculation=ALWAYS)
    for driver in (plain, drafting):
        driver.start(foretelling(13), max_tokens=12)
        driver.drain()
    assert drafting.tokens == plain.tokens
    counters = drafting.state.counters
    assert counters.steps < plain.state.counters.steps
    assert counters.num_accepted_tokens == plain.state.counters.steps - counters.steps > 0
    [tokens] = drafting.tokens.values()
    assert tokens[-1].num_accepted_tokens == counters.num_accepted_tokens
    assert tokens[-1].num_draft_tokens == counters.num_draft_tokens


def test_a_stop_token_within_a_draft_ends_the_sequence_there() -> None:
    driver = Driver(speculation=ALWAYS)
    driver.start(foretelling(13), stops_after=3)
    assert driver.step.slices[0].num_draft == 2, "as many as the sequence's blocks have room for"
    driver.drain()
    assert [token.token_id for token in driver.tokens["r"]] == [next_token(14), next_token(15)]
    assert driver.tokens["r"][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(3, 1_000), (100, 16)])
def test_a_draft_ends_one_token_before_a_length_limit(max_tokens: int, max_model_len: int) -> None:
    driver = Driver(speculation=ALWAYS, max_model_len=max_model_len)
    driver.start(foretelling(13), max_tokens=max_tokens)
    assert driver.step_of() == [("r", 13, 15)]
    driver.compute()
    assert [token.finish_reason for token in driver.tokens["r"]] == [None, FinishReason.LENGTH]


def test_a_draft_takes_no_block_and_no_row_of_another_sequence() -> None:
    driver = Driver(num_blocks=9, speculation=ALWAYS, max_num_batched_tokens=5)
    for name in ("a", "b", "c"):
        driver.start(foretelling(9), name)
        while driver.state.num_waiting:
            driver.compute()
    while driver.step is not None and driver.state.counters.num_preemptions == 0:
        rows = [(piece.num_tokens, len(piece.block_table)) for piece in driver.step.slices]
        assert sum(num_tokens for num_tokens, _ in rows) <= 5
        for piece in driver.step.slices:
            assert len(piece.block_table) == -(-(piece.end - piece.num_draft) // BLOCK_SIZE)
        driver.compute()
    driver.drain()


def test_requests_whose_rows_depend_on_a_step_draft_nothing() -> None:
    driver = Driver(num_blocks=40, speculation=ALWAYS)
    wish = request_of(foretelling(13), "grammar")
    for request in (
        replace(wish, sampling=replace(wish.sampling, grammar='{"type": "object"}')),
        request_of(foretelling(13), "plain"),
    ):
        driver.reserve(foretelling(13), request.request_id)
        driver.commit(request)
        driver.drain_landing()
    driver.compute()
    assert {piece.request_id: piece.num_draft > 0 for piece in driver.step.slices} == {"grammar": False, "plain": True}


def test_lengths_that_are_not_possible_are_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt-lookup-min 5 is above --prompt-lookup-max 4"):
        DecodeConfig(instance_id="w", model="m", prompt_lookup_min=5)
    with pytest.raises(ConfigError, match="--num-speculative-tokens must be at least 1"):
        DecodeConfig(instance_id="w", model="m", num_speculative_tokens=0)


@pytest.mark.parametrize(
    ("kernels", "attention", "options", "max_rows"),
    [
        ("native", "native", {}, sys.maxsize),
        ("native+torch", "native", {}, FEW_TOKENS),
        ("torch", "native", {}, None),
        ("native", "torch", {}, None),
        ("triton", "triton", {}, None),
        ("native", "native", {"async_scheduling": True}, None),
        ("native", "native", {"speculative": "off"}, None),
    ],
)
def test_a_worker_drafts_only_where_a_row_has_the_same_bits_in_every_step(
    kernels: str, attention: str, options: dict[str, Any], max_rows: int | None
) -> None:
    engine = SimpleNamespace(exact_rows=exact_rows(kernels, attention))
    replica: Any = SimpleNamespace(thread=SimpleNamespace(engine=engine), device="cpu", step_costs=(None, None))
    found = AllotmentConfig(**{"speculative": "on", **options}).speculation(replica)
    assert (found and found.max_rows) == max_rows
