"""The last layer computes what is wanted and no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import Attention
from engine.batch import Sampled
from engine.config import load_model_config
from engine.engine import Engine
from protocol.machine import cache_folder
from protocol.request import SamplingParams
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt

LAST = 1  # of two layers
WITH_LOGPROBS = SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=5)


class Asked:
    """An `Attention` that notes which layers it was asked for."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.layers: list[int] = []

    def attend(self, layer: int, *arguments: Any) -> torch.Tensor:
        self.layers.append(layer)
        return self._attention.attend(layer, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


@pytest.fixture(params=["torch", "native"])
def engine(request: pytest.FixtureRequest, llama: Pair) -> Engine:
    config = load_model_config(llama.path)
    return Engine.load(
        llama.path,
        config=config,
        layout=config.kv_layout(16, "float32"),
        num_blocks=16,
        kernels=request.param,
        attention=request.param,
        cache_folder=cache_folder(os.environ, Path.home()),
    )


@pytest.fixture
def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Asked:
    model: Any = engine._model
    asked = Asked(model._attention)
    monkeypatch.setattr(model, "_attention", asked)
    return asked


def test_a_chunk_without_a_token_to_sample_ends_with_the_last_keys_and_values(
    engine: Engine, asked: Asked
) -> None:
    prompt = random_prompt(60)
    told: list[int] = []
    [nothing] = engine.execute([make_slice(prompt, 0, 40, range(4))], told.append)
    assert nothing is None
    assert asked.layers == [0]
    assert told == [0, LAST]  # its K and V are in the pool, and go on from there


def test_rows_that_are_sampled_are_what_they_are_in_any_company(
    engine: Engine, asked: Asked
) -> None:
    """One prompt ends in the step, one does not, one decodes: each alone gives the same token, and about the same
    logarithms (torch's products depend on the number of rows)."""
    ends, goes_on, decodes = (random_prompt(50, seed) for seed in (1, 2, 3))
    engine.execute([make_slice(decodes, 0, 49, range(8, 12))])
    slices = [
        make_slice(goes_on, 0, 33, range(4, 8)),
        make_slice(ends, 0, 50, range(4), sampling=WITH_LOGPROBS),
        make_slice(decodes, 49, 50, range(8, 12), sampling=WITH_LOGPROBS),
    ]
    together = engine.execute(slices)
    assert together[0] is None
    alone = [engine.execute([one])[0] for one in slices[1:]]
    for found, expected in zip(together[1:], alone, strict=True):
        assert_same(found, expected)
    [rest] = engine.execute([make_slice(goes_on, 33, 50, range(4, 8), sampling=WITH_LOGPROBS)])
    [whole] = engine.execute([make_slice(goes_on, 0, 50, range(12, 16), sampling=WITH_LOGPROBS)])
    assert_same(rest, whole)


def assert_same(found: Sampled | None, expected: Sampled | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.token_id == expected.token_id
    assert found.logprobs is not None
    assert expected.logprobs is not None
    own, others = ([log for _, log in each.top] for each in (found.logprobs, expected.logprobs))
    assert own == pytest.approx(others, abs=1e-4)
