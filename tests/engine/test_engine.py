"""Engine.execute: where it writes KV, which slices it refuses, and that results do not depend on the rest of a step."""

import asyncio
import mmap
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.harness.generate import generate
from moonserve.engine.engine import Engine, EngineThread
from moonserve.engine.model.config import load_model_config
from moonserve.protocol.errors import ConfigError, InvalidRequest
from moonserve.protocol.request import SamplingParams
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt
from tests.patience import PATIENCE_S

LAST = 1  # index of the last of two layers


def test_kv_is_at_the_offsets_of_the_layout(llama: Pair) -> None:
    """The bytes at `pool_offset` are transformers' keys and values of each token."""
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
                found = torch.frombuffer(engine.memory, dtype=torch.float32, offset=offset, count=own.numel())
                torch.testing.assert_close(found.view(own.shape), own, atol=1e-5, rtol=1e-5)


def test_on_layer_is_called_once_the_layer_is_in_the_pool(llama: Pair) -> None:
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


def test_pool_uses_the_given_memory_if_it_is_large_enough(llama: Pair) -> None:
    layout = load_model_config(llama.path).kv_layout(16, "float32")
    memory = memoryview(mmap.mmap(-1, layout.pool_bytes(4)))
    engine = llama.engine(num_blocks=4, memory=memory)
    assert engine.memory is memory
    engine.execute([make_slice(random_prompt(5), 0, 5, [3])])
    offset = layout.pool_offset(4, 0, 3)
    assert any(memory[offset : offset + layout.token_bytes])
    with pytest.raises(ConfigError, match="writable bytes"):
        llama.engine(num_blocks=4, memory=memory[:-1])


@pytest.mark.parametrize(
    ("tokens", "start", "end", "blocks", "complaint"),
    [
        (random_prompt(10), 0, 11, [0], "slice"),
        (random_prompt(10), 5, 5, [0], "slice"),
        (random_prompt(10), 3, 2, [0], "slice"),
        (random_prompt(10), 0, 10, [], "slice"),
        (random_prompt(10), -1, 5, [0], "slice"),
        ([1, 2, 99_999], 0, 3, [0], "vocabulary"),
    ],
)
def test_invalid_slice_is_refused(
    tokens: list[int], start: int, end: int, blocks: list[int], complaint: str, llama: Pair
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        llama.engine(num_blocks=2).execute([make_slice(tokens, start, end, blocks)])


def test_fingerprints_differ_by_weights_dtype_and_block_size(pairs: dict[str, Pair]) -> None:
    llama = pairs["llama"]
    engines = [
        llama.engine(num_blocks=2),
        llama.engine(num_blocks=2, dtype="bfloat16"),
        llama.engine(num_blocks=2, block_size=8),
        pairs["llama-biases-llama3"].engine(num_blocks=2),
    ]
    assert len({engine.fingerprint for engine in engines}) == 4
    assert llama.engine(num_blocks=4).fingerprint == engines[0].fingerprint


@pytest.fixture(params=["torch", "native"])
def engine(request: pytest.FixtureRequest, llama: Pair) -> Engine:
    return llama.engine(num_blocks=16, kernels=request.param, attention=request.param)


def test_chunk_without_sampling_stops_after_the_last_keys_and_values(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention: Any = engine._attention
    attend = Mock(wraps=attention.attend)
    monkeypatch.setattr(attention, "attend", attend)
    reported: list[int] = []
    assert engine.execute([make_slice(random_prompt(60), 0, 40, range(4))], reported.append) == [None]
    assert [call.args[0] for call in attend.call_args_list] == [0]
    assert reported == [0, LAST]  # all K and V are in the pool and can be sent
    assert engine.execute([]) == []


def test_seeded_sampling_does_not_depend_on_batch_or_start(llama: Pair) -> None:
    """A prompt plus the tokens already sent, with the same seed, continues with the same tokens."""
    engine = llama.engine()
    prompts = [random_prompt(20 + seed, seed=seed) for seed in range(4)]
    samplings = [SamplingParams(max_tokens=12, temperature=0.9, seed=seed) for seed in range(4)]
    together = generate(engine, prompts, samplings, chunk_size=16)
    for prompt, sampling, result in zip(prompts, samplings, together, strict=True):
        [alone] = generate(engine, [prompt], sampling)
        assert alone.token_ids == result.token_ids
        [rest] = generate(engine, [prompt + alone.token_ids[:5]], sampling)
        assert rest.token_ids[:7] == alone.token_ids[5:]


async def test_cancelled_caller_waits_for_the_end_of_its_step(llama: Pair) -> None:
    runtime = EngineThread(llama.engine(num_blocks=4))
    started, proceed = threading.Event(), threading.Event()
    layers: list[int] = []

    def on_layer(layer: int) -> None:
        started.set()
        assert proceed.wait(timeout=PATIENCE_S)
        layers.append(layer)

    task = asyncio.create_task(runtime.execute([make_slice(random_prompt(5), 0, 5, [0])], on_layer))
    await asyncio.to_thread(started.wait, PATIENCE_S)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert layers == [0, 1]
    runtime.close()
