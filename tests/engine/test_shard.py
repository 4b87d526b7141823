"""What ranks of a worker have of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import ModelConfig, load_model_config
from engine.parts import shards
from protocol.errors import ConfigError
from tests.engine.conftest import Pair
from tests.thoroughness import examples


@pytest.fixture
def config(llama: Pair) -> ModelConfig:
    return load_model_config(llama.path)


@given(
    size=st.integers(1, 16),
    kv_heads_each=st.integers(1, 4),
    group=st.integers(1, 8),
    inner_each=st.integers(1, 100),
    vocab_size=st.integers(1, 300),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranks_share_everything_once(
    config: ModelConfig, size: int, kv_heads_each: int, group: int, inner_each: int, vocab_size: int
) -> None:
    """In order, equal parts but for the vocabulary, and query heads where the KV head is that they share."""
    config = replace(
        config,
        num_heads=size * kv_heads_each * group,
        num_kv_heads=size * kv_heads_each,
        intermediate_size=size * inner_each,
        vocab_size=vocab_size,
    )
    parts = shards(config, size)
    assert [part.rank for part in parts] == list(range(size))
    for name, count in (
        ("heads", config.num_heads),
        ("kv_heads", config.num_kv_heads),
        ("inner", config.intermediate_size),
        ("vocabulary", vocab_size),
    ):
        assert [index for part in parts for index in getattr(part, name)] == list(range(count))
    for part in parts:
        own = part.of(config)
        assert own.num_heads == group * own.num_kv_heads == group * kv_heads_each
        assert own.intermediate_size == inner_each
        assert {head // group for head in part.heads} == set(part.kv_heads)
        assert len(part.vocabulary) <= -(-vocab_size // size)


def test_a_model_that_cannot_be_cut_evenly_is_refused(config: ModelConfig) -> None:
    """A KV head has one writer, so there are at most as many ranks as KV heads."""
    whole = replace(config, num_heads=8, num_kv_heads=4)
    with pytest.raises(ConfigError, match="num_key_value_heads of 2"):
        shards(replace(whole, num_kv_heads=2), 4)
    with pytest.raises(ConfigError, match="of 98"):
        shards(replace(whole, intermediate_size=98), 4)
