"""Sampling: distributions, filters, penalties and log-probabilities, all independent of the rest of the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.engine.model.sampler import adjust, draw_token, filter_tokens, random_bits, sample, uniform
from moonserve.protocol.request import SamplingParams
from tests.engine.steps import last_of
from tests.thoroughness import examples

VOCAB = 12


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **fields})


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
def test_frequencies_over_positions_follow_the_filtered_distribution(fields: dict[str, Any]) -> None:
    """Chi-square test over 4,000 positions of one seed."""
    logits = random_logits(1)
    sampling = params(seed=11, **fields)
    weights = torch.softmax(logits[0] / sampling.temperature, -1).numpy()
    expected = reference_filter(weights.astype(np.float64), sampling)
    counts = np.zeros(VOCAB)
    for position in range(4000):
        counts[draw_token(weights, sampling, position)] += 1
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = np.sum((counts[kept] - 4000 * expected[kept]) ** 2 / (4000 * expected[kept]))
    # 0.1 % quantiles of chi-square with 0 … 11 degrees of freedom.
    limits = [0.1, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3]
    assert chi_square < limits[int(kept.sum()) - 1]


def reference_filter(
    weights: np.ndarray[Any, np.dtype[np.float64]], sampling: SamplingParams
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Applies min-p, top-k and top-p in this order, each to the previous result, as simply as possible."""
    probabilities = weights.copy()
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    order = sorted(range(len(weights)), key=lambda token: (-probabilities[token], token))
    if sampling.top_k > 0:
        for token in order[sampling.top_k :]:
            probabilities[token] = 0
    if sampling.top_p < 1:
        reached, enough = 0.0, sampling.top_p * probabilities.sum()
        for token in order:
            if reached >= enough:
                probabilities[token] = 0
            reached += probabilities[token]
    return probabilities / probabilities.sum()


@settings(max_examples=examples(50), deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab=st.integers(1, 60),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([1 / 128, 0.25, 0.75, 0.9375, 1.0]),
    min_p=st.sampled_from([0.0, 0.0625, 0.375, 1.0]),
    ties=st.booleans(),
)
def test_filters_equal_a_plain_reference(
    seed: int, vocab: int, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    # Weights, top-p and min-p are multiples of powers of two, so that nothing is rounded and a token exactly on a
    # boundary belongs to one side.
    weights = (rng.integers(1, 4 if ties else 1000, vocab) / 1024).astype(np.float32)
    sampling = params(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = filter_tokens(weights, sampling)
    found = np.arange(vocab) if kept is None else kept
    expected = np.flatnonzero(reference_filter(weights.astype(np.float64), sampling))
    if top_p == 1.0 or not ties:
        assert found.tolist() == expected.tolist()
    assert len(found) >= 1
    assert sorted(set(found.tolist())) == found.tolist()


def test_drawn_token_depends_only_on_seed_and_position() -> None:
    """A slice samples the same token alone, next to others, first or last in a batch."""
    logits = random_logits(6, vocab=200, seed=3)
    wishes = [
        params(temperature=0.8, seed=5),
        params(temperature=0.0),
        params(temperature=1.5, top_p=0.9, seed=6),
        params(temperature=1.0, top_k=20, seed=7, repetition_penalty=1.3),
        params(temperature=0.7, min_p=0.02, seed=8),
        params(temperature=1.0, seed=5),
    ]
    slices = [last_of([1, 2, 3], wish) for wish in wishes]
    before = logits.clone()
    together = [one.token_id for one in sample(logits, slices)]
    alone = [sample(logits[row : row + 1], slices[row : row + 1])[0].token_id for row in range(6)]
    backwards = [one.token_id for one in sample(logits.flip(0), slices[::-1])][::-1]
    assert together == alone == backwards
    assert together[1] == int(logits[1].argmax())
    assert torch.equal(logits, before)


def test_penalties_follow_their_definitions() -> None:
    """Repetition counts prompt and output tokens. Presence and frequency count only output tokens."""
    sampling = params(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    row = np.array([1.0, -1.0, 2.0, -2.0, 3.0], dtype=np.float32)
    adjust(row, last_of([0, 1, 2, 2, 3], sampling, num_prompt_tokens=2))
    expected = [0.5, -2.0, 1.0 - 0.5 - 2 * 0.25, -4.0 - 0.5 - 0.25, 3.0]
    assert row.tolist() == pytest.approx(expected)


def test_bias_and_min_tokens_apply_to_greedy_sampling() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0, 0.0]])
    biased = params(temperature=0.0, logit_bias={2: 10.0})
    assert sample(logits, [last_of([1], biased)])[0].token_id == 2
    waiting = params(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({0}))
    tokens = [9, 9]
    chosen = []
    for _ in range(3):
        chosen.append(sample(logits, [last_of(tokens, waiting, num_prompt_tokens=2)])[0].token_id)
        tokens = [*tokens, chosen[-1]]
    assert chosen == [1, 1, 0]


def test_logprobs_are_taken_before_sampling_options() -> None:
    """Log-probabilities are taken before temperature, penalties and filters, also of a token outside the top."""
    logits = random_logits(4, vocab=50)
    expected = torch.log_softmax(logits, -1)
    slices = [
        last_of([1], params(temperature=1.5, num_logprobs=4, logit_bias={7: 100.0})),
        last_of([1], params(num_logprobs=None)),
        last_of([1], params(temperature=0.0, num_logprobs=0)),
    ]
    slices.append(last_of([1], params(num_logprobs=99)))
    first, second, third, all_ = sample(logits, slices)
    assert first.token_id == 7
    assert first.logprobs.sampled == pytest.approx(float(expected[0, 7]))
    assert [token for token, _ in first.logprobs.top] == expected[0].topk(4).indices.tolist()
    assert second.logprobs is None
    assert third.logprobs.top == ()
    assert third.logprobs.sampled == pytest.approx(float(expected[2].max()))
    assert len(all_.logprobs.top) == 50


# -- bad words

SHORT_WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=examples(100))
@given(words=SHORT_WORDS, prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_bad_words_are_never_sampled(words: list[tuple[int, ...]], prompt: list[int]) -> None:
    """Tokens 0 to 3 are likely, and 4 is always left. A word that begins in the prompt does not count."""
    sampling = params(bad_words=tuple(words), seed=5)
    logits = torch.tensor([[6.0, 6.0, 6.0, 6.0, 0.0]])
    tokens = list(prompt)
    for _ in range(12):
        before = tokens[len(prompt) :]
        [sampled] = sample(logits, [last_of(tokens, sampling, len(prompt))])
        ends = [(*before, sampled.token_id)[-len(word) :] for word in words]
        assert all(end != word for end, word in zip(ends, words, strict=True))
        tokens.append(sampled.token_id)


def test_bad_word_is_sampled_if_no_other_token_is_left() -> None:
    logits = torch.full((1, 3), -torch.inf)
    logits[0, 1] = 0.0
    [sampled] = sample(logits, [last_of([0], params(bad_words=((1,),), temperature=0.0))])
    assert sampled.token_id == 1


@pytest.mark.parametrize(("key", "counter"), [(0, 1), (1, 1), (42, 77), (2**64 - 1, 2**40), (123456789, 8192)])
def test_bits_equal_numpys_philox(key: int, counter: int) -> None:
    # numpy increments its counter before it generates a number.
    reference = np.random.Philox(key=np.array([key, 0], np.uint64), counter=counter - 1)
    assert random_bits(key, counter) == int(reference.random_raw())


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(7, position) for position in range(4000)], [uniform(seed, 7) for seed in range(4000)]):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        chi_square = float(np.sum((counts - 200) ** 2 / 200))
        assert chi_square < 43.8  # 0.1 % quantile, 19 degrees of freedom
        assert min(numbers) >= 0
        assert max(numbers) < 1
