"""Engine.execute: what it writes where, what it refuses, what it reports."""

from __future__ import annotations

import mmap

import pytest
import torch

from engine.config import load_model_config
from engine.engine import Engine
from protocol.errors import ConfigError, InvalidRequest
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt


def test_no_slices_are_no_work(llama: Pair) -> None:
    assert llama.engine().execute([]) == []


def test_kv_lies_where_the_layout_says(llama: Pair) -> None:
    """The bytes at pool_offset are transformers' keys and values, token by token."""
    engine = llama.engine(num_blocks=6)
    prompt = random_prompt(20)
    engine.execute([make_slice(prompt, 0, 20, [4, 1])])
    cache = llama.reference(torch.tensor([prompt]), use_cache=True).past_key_values
    layout = engine.layout
    for layer in range(layout.num_layers):
        for piece, stored in ((0, cache.layers[layer].keys), (1, cache.layers[layer].values)):
            for index, block in enumerate([4, 1]):
                own = stored[0, :, index * 16 : (index + 1) * 16].transpose(0, 1)
                offset = layout.pool_offset(6, 2 * layer + piece, block)
                found = torch.frombuffer(
                    engine.memory, dtype=torch.float32, offset=offset, count=own.numel()
                )
                torch.testing.assert_close(found.view(own.shape), own, atol=1e-5, rtol=1e-5)


def test_on_layer_is_called_when_that_layer_is_in_the_pool(llama: Pair) -> None:
    engine = llama.engine(num_blocks=2)
    seen: list[tuple[int, list[bool]]] = []

    def on_layer(layer: int) -> None:
        written = [
            any(engine.memory[(offset := engine.layout.pool_offset(2, 2 * n + 1, 0)) : offset + 64])
            for n in range(engine.layout.num_layers)
        ]
        seen.append((layer, written))

    engine.execute([make_slice(random_prompt(5), 0, 5, [0])], on_layer)
    assert seen == [(0, [True, False]), (1, [True, True])]


def test_the_pool_is_the_memory_it_was_given(llama: Pair) -> None:
    config = load_model_config(llama.path)
    layout = config.kv_layout(16, "float32")
    memory = memoryview(mmap.mmap(-1, layout.pool_bytes(4)))
    engine = Engine.load(
        llama.path, config=config, layout=layout, num_blocks=4, memory=memory, num_threads=1
    )
    assert engine.memory is memory
    engine.execute([make_slice(random_prompt(5), 0, 5, [3])])
    offset = layout.pool_offset(4, 0, 3)
    assert any(memory[offset : offset + layout.token_bytes])


def test_memory_that_is_too_small_is_refused(llama: Pair) -> None:
    config = load_model_config(llama.path)
    layout = config.kv_layout(16, "float32")
    with pytest.raises(ConfigError, match="writable bytes"):
        Engine.load(
            llama.path,
            config=config,
            layout=layout,
            num_blocks=4,
            memory=memoryview(bytearray(100)),
        )


@pytest.mark.parametrize(
    ("start", "end", "blocks"), [(0, 11, [0]), (5, 5, [0]), (3, 2, [0]), (0, 10, []), (-1, 5, [0])]
)
def test_a_slice_that_does_not_fit_is_refused(
    start: int, end: int, blocks: list[int], llama: Pair
) -> None:
    with pytest.raises(InvalidRequest, match="slice"):
        llama.engine(num_blocks=2).execute([make_slice(random_prompt(10), start, end, blocks)])


def test_a_token_outside_the_vocabulary_is_refused(llama: Pair) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llama.engine(num_blocks=2).execute([make_slice([1, 2, 99_999], 0, 3, [0])])


def test_fingerprints_differ_by_weights_dtype_and_block_size(pairs: dict[str, Pair]) -> None:
    llama, other = pairs["llama"], pairs["llama-biases-llama3"]
    engines = [
        llama.engine(num_blocks=2),
        llama.engine(num_blocks=2, dtype="bfloat16"),
        llama.engine(num_blocks=2, block_size=8),
        other.engine(num_blocks=2),
    ]
    assert len({engine.fingerprint for engine in engines}) == 4
    assert llama.engine(num_blocks=4).fingerprint == engines[0].fingerprint


def test_dummy_weights_need_no_files_and_are_always_the_same(llama: Pair) -> None:
    config = load_model_config(llama.path)
    layout = config.kv_layout(16, "float32")
    results = []
    for _ in range(2):
        engine = Engine.load(
            llama.path / "absent", config=config, layout=layout, num_blocks=2, load_format="dummy"
        )
        [sampled] = engine.execute([make_slice(random_prompt(9), 0, 9, [0])])
        results.append((engine.fingerprint, sampled))
    assert results[0] == results[1]
