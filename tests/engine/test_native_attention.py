"""The native kernels give what the torch reference gives, and their absence is survived."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import Attention, Geometry, Span, make_attention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import generate
from engine.kv_pool import KvPool
from protocol import native
from protocol.errors import ConfigError
from protocol.layout import KvLayout
from protocol.request import SamplingParams
from tests.engine.conftest import Pair
from tests.engine.steps import random_prompt


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def random_pool(head_dim: int, dtype: str, block_size: int = 16) -> KvPool:
    layout = KvLayout(
        num_layers=1, block_size=block_size, num_kv_heads=2, head_dim=head_dim, dtype=dtype
    )
    pool = KvPool(layout, 40)
    generator = torch.Generator().manual_seed(0)
    for piece in (*pool.keys, *pool.values):
        piece.copy_(torch.randn(piece.shape, generator=generator) * 2)
    return pool


def attend(backend: Attention, spans: list[Span], window: int | None, pool: KvPool) -> torch.Tensor:
    layout = pool.layout
    num_tokens = sum(span.end - span.start for span in spans)
    generator = torch.Generator().manual_seed(1)
    # As in the model: queries are a part of a wider tensor.
    wide = torch.randn(num_tokens, 8, layout.head_dim, generator=generator).to(pool.keys[0].dtype)
    keys, values = wide[:, 4:6], wide[:, 6:]
    row = 0
    for span in spans:
        tokens = np.arange(span.start, span.end)
        slots = torch.from_numpy(
            span.blocks[tokens // layout.block_size] * layout.block_size
            + tokens % layout.block_size
        )
        own = slice(row, row := row + len(tokens))
        pool.write(0, slots, keys[own], values[own])
    plan = backend.plan(spans, window)
    return backend.attend(0, plan, wide[:, :6], keys, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("window", [None, 20])
def test_native_equals_torch(dtype: str, head_dim: int, window: int | None, kernels: Path) -> None:
    pool = random_pool(head_dim, dtype)
    geometry = Geometry(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    rng = np.random.default_rng(0)
    lengths = [(n - 1, n) for n in (1, 2, 15, 16, 17, 60, 150)] + [(10, 35), (0, 50)]
    blocks = iter(rng.permutation(40))
    spans = [
        Span(start, end, np.fromiter(blocks, np.int64, -(-end // 16))) for start, end in lengths
    ]
    reference = attend(make_attention("torch", geometry, pool, None), spans, window, pool)
    native = attend(make_attention("native", geometry, pool, kernels), spans, window, pool)
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    torch.testing.assert_close(native, reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-biases"])
def test_tokens_with_the_native_kernel_equal_those_of_transformers(
    name: str, pairs: dict[str, Pair], kernels: Path
) -> None:
    """Also where nobody cleans what earlier holders left in the pool."""
    config = load_model_config(pairs[name].path)
    engine = Engine.load(
        pairs[name].path,
        config=config,
        layout=config.kv_layout(16, "float32"),
        num_blocks=160,
        kernels="torch",
        attention="native",
        cache_folder=kernels,
    )
    assert engine.attention_name == "native"
    engine.memory[:] = b"\xff" * engine.memory.nbytes  # NaN in every element
    prompts = [random_prompt(length, seed=length) for length in (1, 16, 100, 300)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    results = generate(engine, prompts, sampling, chunk_size=90)
    assert [one.token_ids for one in results] == [
        pairs[name].generate(prompt, 12) for prompt in prompts
    ]


def test_stale_bytes_behind_a_sequence_are_never_read(kernels: Path) -> None:
    pool = random_pool(64, "float32")
    span = Span(4, 5, np.array([3]))
    geometry = Geometry(num_heads=6, num_kv_heads=2, head_dim=64)
    backend = make_attention("native", geometry, pool, kernels)
    before = attend(backend, [span], None, pool)
    pool.keys[0][3, 5:] = float("nan")
    pool.values[0][3, 5:] = float("nan")
    assert torch.equal(attend(backend, [span], None, pool), before)


def test_without_a_compiler_auto_falls_back_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _name: None)
    pool = random_pool(16, "float32")
    geometry = Geometry(num_heads=6, num_kv_heads=2, head_dim=16)
    with caplog.at_level(logging.WARNING):
        backend = make_attention("auto", geometry, pool, tmp_path)
    assert isinstance(backend, TorchPagedAttention)
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        make_attention("native", geometry, pool, tmp_path)


def test_a_damaged_library_is_an_error_of_its_own(tmp_path: Path, kernels: Path) -> None:
    pool = random_pool(16, "float32")
    geometry = Geometry(num_heads=6, num_kv_heads=2, head_dim=16)
    make_attention("native", geometry, pool, kernels)
    [library] = (kernels / "kernels").iterdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / library.name).write_bytes(b"not a library")
    with pytest.raises(ConfigError, match="not available"):
        make_attention("native", geometry, pool, tmp_path)


def test_an_unknown_backend_is_refused() -> None:
    pool = random_pool(16, "float32")
    with pytest.raises(ConfigError, match="flash"):
        make_attention("flash", Geometry(6, 2, 16), pool, None)
