"""A model split into stages computes the same bits as the whole model. Also the shard that each rank has of a model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonserve.engine.engine import Engine
from moonserve.engine.kv_cache.tensors import allocate_memory
from moonserve.engine.model.batch import HiddenStates, Sampled, Slice
from moonserve.engine.model.config import ModelConfig, load_model_config
from moonserve.engine.model.partition import Stage, split_into_shards, split_into_stages, stages_of_lengths
from moonserve.engine.model.weights import load_weights
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import SamplingParams
from tests.engine.conftest import VARIANTS, Pair
from tests.engine.steps import make_slice, random_prompt
from tests.random_models import make_model
from tests.thoroughness import examples

LAYERS = 4
WITH_LOGPROBS = SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=5)


@pytest.fixture(scope="module", params=["llama", "qwen2-window", "qwen3-biases"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp(request.param)
    family, overrides = VARIANTS[request.param]
    return Pair(path, make_model(family, path, num_hidden_layers=LAYERS, **overrides))


def load(pair: Pair, kernels: str, stage: Stage | None = None, **dtypes: str) -> Engine:
    return pair.engine(num_blocks=24, kernels=kernels, attention=kernels, stage=stage, **dtypes)


class Pipeline:
    """Consecutive stages, each with its own pool."""

    def __init__(self, pair: Pair, kernels: str, counts: Sequence[int], **dtypes: str) -> None:
        self.engines = [load(pair, kernels, stage, **dtypes) for stage in stages_of_lengths(counts)]
        config = self.engines[0].config
        nbytes = 256 * config.hidden_size * 4
        self._rooms = [allocate_memory(nbytes) for _ in counts]

    def execute(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        given: memoryview | None = None
        results: list[Sampled | None] = []
        for engine, room in zip(self.engines, self._rooms, strict=True):
            fetch = None if given is None else partial(memoryview, given)
            results = engine.execute(slices, hidden=HiddenStates(fetch=fetch, passed_on=room))
            given = room
        return results

    def pool(self) -> bytes:
        return b"".join(bytes(engine.memory) for engine in self.engines)


def steps() -> list[list[Slice]]:
    """Returns steps with chunks of two prompts side by side, a whole short prompt, and a decode step of all three."""
    long, other, short = (random_prompt(*seeded) for seeded in ((70, 1), (45, 2), (9, 3)))
    tables = (range(6), range(6, 11), range(11, 14))

    def piece(row: int, start: int, end: int, tokens: list[int]) -> Slice:
        return make_slice(tokens, start, end, tables[row], request_id=f"r{row}", sampling=WITH_LOGPROBS)

    chunks = [
        [piece(0, 0, 32, long)],
        [piece(0, 32, 50, long), piece(1, 0, 14, other)],
        [piece(2, 0, 9, short), piece(0, 50, 70, long), piece(1, 14, 30, other)],
        [piece(1, 30, 45, other)],
    ]
    grown = [[*tokens, 7] for tokens in (long, other, short)]
    decode = [piece(row, len(t) - 1, len(t), t) for row, t in enumerate(grown)]
    return [*chunks, decode]


@pytest.mark.parametrize(
    ("kernels", "counts", "dtypes"),
    [
        ("torch", (1, 2, 1), {}),
        ("torch", (3, 1), {}),
        ("native", (2, 2), {}),
        ("native", (1, 1, 1, 1), {}),
        ("native", (1, 3), {"dtype": "bfloat16"}),
        ("native", (1, 3), {"dtype": "bfloat16", "kv_dtype": "int8"}),
    ],
)
def test_any_division_into_stages_gives_the_same_bits(
    pair: Pair, kernels: str, counts: tuple[int, ...], dtypes: dict[str, str]
) -> None:
    """Tokens, log-probabilities and every byte of KV are equal for chunked and mixed steps, with all kernels. In
    bfloat16 nothing is rounded between stages that is not also rounded within one engine."""
    whole, pipeline = load(pair, kernels, **dtypes), Pipeline(pair, kernels, counts, **dtypes)
    for step in steps():
        assert pipeline.execute(step) == whole.execute(step)
    assert pipeline.pool() == bytes(whole.memory)


def test_stages_of_latent_attention_give_the_same_bits(tmp_path: Path) -> None:
    """The first stage has the layer with a plain MLP, the second one the mixtures."""
    pair = Pair(tmp_path, make_model("deepseek_v3", tmp_path))
    test_any_division_into_stages_gives_the_same_bits(pair, "native", (1, 2), {"dtype": "bfloat16"})


def test_stage_has_the_fingerprint_of_the_model_and_only_its_own_weights(pair: Pair) -> None:
    """Workers are matched by the whole model. A stage loads only its own layers and at most one vocabulary matrix."""
    config = load_model_config(pair.path)
    whole, *parts = (
        load_weights(pair.path, config, torch.float32, stage=stage) for stage in (None, *split_into_stages(LAYERS, 3))
    )
    assert {part.digest for part in parts} == {whole.digest}
    assert [len(part.layers) for part in parts] == [2, 1, 1]
    assert [len(part.embedding) > 0 for part in parts] == [True, False, False]
    assert [len(part.lm_head) > 0 for part in parts] == [False, False, True]
    assert torch.equal(parts[1].layers[0].qkv, whole.layers[2].qkv)
    assert torch.equal(parts[2].lm_head, whole.lm_head)
    fingerprints = {load(pair, "torch", stage).fingerprint for stage in split_into_stages(LAYERS, 2)}
    assert fingerprints == {load(pair, "torch").fingerprint}


def test_random_weights_need_no_files_and_are_the_same_in_stages(pair: Pair) -> None:
    """`--load-format dummy` gives a group of workers the same weights as a single worker."""
    config = load_model_config(pair.path)
    whole, last = (
        load_weights(pair.path / "absent", config, torch.float32, load_format="dummy", stage=stage)
        for stage in (None, split_into_stages(LAYERS, 2)[1])
    )
    assert last.digest == whole.digest
    assert torch.equal(last.layers[1].mlps[0].down, whole.layers[3].mlps[0].down)


def test_later_stage_requires_hidden_states_and_does_not_change_them(pair: Pair) -> None:
    """A later stage has no embedding to start from. Its input may lie in memory that a peer has written."""
    first, last = (load(pair, "native", stage) for stage in split_into_stages(LAYERS, 2))
    room = allocate_memory(64 * first.config.hidden_size * 4)
    step = [make_slice(random_prompt(40), 0, 40, range(3))]
    first.execute(step, hidden=HiddenStates(passed_on=room))
    before = np.frombuffer(room, np.uint8).copy()
    last.execute(step, hidden=HiddenStates(fetch=lambda: room))
    assert np.array_equal(before, np.frombuffer(room, np.uint8))
    with pytest.raises(ValueError, match="hidden states"):
        last.execute(step)


@given(num_layers=st.integers(1, 130), size=st.integers(1, 130))
@settings(max_examples=examples(50), deadline=None)
def test_stages_divide_all_layers_evenly(num_layers: int, size: int) -> None:
    """Stages are contiguous and complete, and differ by at most one layer. More stages than layers are refused."""
    if size > num_layers:
        with pytest.raises(ConfigError):
            split_into_stages(num_layers, size)
        return
    stages = split_into_stages(num_layers, size)
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    assert len({len(stage.layers) for stage in stages} | {num_layers // size}) <= 2
    assert [stage.is_first for stage in stages] == [True] + [False] * (size - 1)
    assert [stage.is_last for stage in stages] == [False] * (size - 1) + [True]


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
def test_shards_cover_everything_exactly_once(
    config: ModelConfig, size: int, kv_heads_each: int, group: int, inner_each: int, vocab_size: int
) -> None:
    """Parts are in order and equal except for the vocabulary. Query heads are on the rank of the KV head they share."""
    config = replace(
        config,
        num_heads=size * kv_heads_each * group,
        num_kv_heads=size * kv_heads_each,
        intermediate_size=size * inner_each,
        vocab_size=vocab_size,
    )
    parts = split_into_shards(config, size)
    assert [part.rank for part in parts] == list(range(size))
    for name, count in (
        ("heads", config.num_heads),
        ("kv_heads", config.num_kv_heads),
        ("inner", config.intermediate_size),
        ("vocabulary", vocab_size),
    ):
        assert [index for part in parts for index in getattr(part, name)] == list(range(count))
    for part in parts:
        own = part.shard_config(config)
        assert own.num_heads == group * own.num_kv_heads == group * kv_heads_each
        assert own.intermediate_size == inner_each
        assert {head // group for head in part.heads} == set(part.kv_heads)
        assert len(part.vocabulary) <= -(-vocab_size // size)


def test_model_that_cannot_be_divided_evenly_is_refused(config: ModelConfig) -> None:
    """A KV head has one writer, so there are at most as many ranks as KV heads."""
    whole = replace(config, num_heads=8, num_kv_heads=4)
    with pytest.raises(ConfigError, match="num_key_value_heads of 2"):
        split_into_shards(replace(whole, num_kv_heads=2), 4)
    with pytest.raises(ConfigError, match="of 98"):
        split_into_shards(replace(whole, intermediate_size=98), 4)
