"""Which attention there is: torch and native give the same, and the absence of native kernels is survived."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.attention import Attention, make_attention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import generate
from protocol import native
from protocol.errors import ConfigError
from protocol.request import SamplingParams
from tests.engine.attention_cases import Case
from tests.engine.conftest import Pair
from tests.engine.steps import random_prompt


def make(name: str, cache_folder: Path | None) -> Attention:
    """For a small pool."""
    case = Case(lengths=[(0, 1)])
    return make_attention(name, case.geometry, case.pool, cache_folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("window", [None, 20])
def test_torch_equals_dense_attention(dtype: str, head_dim: int, window: int | None) -> None:
    """As the native kernels do (test_native_attention_numbers): what one takes over from the other is the same."""
    lengths = [(n - 1, n) for n in (1, 2, 15, 16, 17, 60, 150)] + [(10, 35), (0, 50)]
    case = Case(lengths=lengths, dtype=dtype, head_dim=head_dim, window=window)
    for piece in (*case.pool.keys, *case.pool.values):
        piece.nan_to_num_(9.0)  # it reads whole blocks
    case.check(case.attend(make_attention("torch", case.geometry, case.pool, None)))


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


def test_without_a_compiler_auto_falls_back_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _name: None)
    with caplog.at_level(logging.WARNING):
        backend = make("auto", tmp_path)
    assert isinstance(backend, TorchPagedAttention)
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        make("native", tmp_path)


def test_a_damaged_library_is_an_error_of_its_own(tmp_path: Path, kernels: Path) -> None:
    make("native", kernels)
    (tmp_path / "kernels").mkdir()
    for library in (kernels / "kernels").glob("paged-*.so"):
        (tmp_path / "kernels" / library.name).write_bytes(b"not a library")
    with pytest.raises(ConfigError, match="not available"):
        make("native", tmp_path)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="flash"):
        make("flash", None)
