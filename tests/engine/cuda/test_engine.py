"""A whole engine on Triton kernels samples the tokens of transformers, also with CUDA graphs: padded, refilled, and
used only where they are allowed.

Without a GPU, a replay runs the same work again on the same tensors. This tests what is captured and how graphs are
filled; `benchmarks/gpu_check.sh` tests the capture by CUDA.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")

from moonserve.engine.cuda.attention import TritonAttention
from moonserve.engine.cuda.graphs import GraphedModel, Replay
from moonserve.engine.cuda.layers import TritonKernels
from moonserve.engine.engine import Engine
from moonserve.engine.kernels import Geometry
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.forward_pass import Model
from moonserve.engine.model.weights import load_weights
from moonserve.protocol.errors import ConfigError
from tests.engine.conftest import Pair
from tests.engine.steps import GREEDY, decode_ahead, make_slice, random_prompt, tokens_of

TRITON = {"kernels": "triton", "attention": "triton", "num_blocks": 40}


class Captures:
    """Stands for CUDA graphs: runs the work once to capture it and again for each replay, and counts both."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> Replay:
        self.captured += 1
        work()

        def replay() -> torch.Tensor:
            self.replayed += 1
            return work()

        return replay


def graphed_engine(pair: Pair, captures: Captures, device: torch.device) -> tuple[Engine, KvTensors]:
    config = load_model_config(pair.path)
    pool = KvTensors(config.kv_layout(16, "float32"), 20, None, device)
    weights = load_weights(pair.path, config, torch.float32, device=device)
    geometry = Geometry(config.num_heads, config.num_kv_heads, config.head_dim)
    attention = TritonAttention(geometry, pool)
    model = Model(config, TritonKernels(config, weights, pool), attention)
    graphed = GraphedModel(model, config, pool, captures)
    return Engine(config, graphed, attention, pool, weights.digest), pool


@pytest.mark.parametrize("name", ["llama-biases-llama3", "mistral-window", "qwen3-biases"])
def test_tokens_equal_those_of_transformers(name: str, pairs: dict[str, Pair], device: torch.device) -> None:
    engine = pairs[name].engine(device=str(device), **TRITON)
    assert (engine.kernels_name, engine.attention_name) == ("triton", "triton")
    prompts = [random_prompt(length, seed=length) for length in (1, 70)]
    found = tokens_of(engine, prompts, 3, chunk_size=50)
    assert found == [pairs[name].generate(prompt, 3) for prompt in prompts]


@pytest.mark.parametrize(("name", "by_graph"), [("llama", False), ("mistral-window", True)])
def test_tokens_fed_on_the_device_equal_those_of_transformers(
    name: str, by_graph: bool, pairs: dict[str, Pair], device: torch.device
) -> None:
    """One prompt is a single token, so that the rows and the slices of the first steps differ in order."""
    captures = Captures()
    engine = (
        graphed_engine(pairs[name], captures, device)[0]
        if by_graph
        else pairs[name].engine(device=str(device), **TRITON)
    )
    prompts = [random_prompt(length, seed=length) for length in (20, 1, 3)]
    found = decode_ahead(engine, prompts, [GREEDY] * 3, 4)
    assert found == [pairs[name].generate(prompt, 4) for prompt in prompts]
    assert captures.replayed == (3 if by_graph else 0)
    assert captures.captured == by_graph  # three sequences use a graph for four


def test_capture_and_padding_rows_store_nothing(llama: Pair, device: torch.device) -> None:
    """Capture and padding rows write nothing: only 22 slots of each of three sequences (20 + 3 tokens) change."""
    engine, pool = graphed_engine(llama, Captures(), device)
    pieces = (*pool.keys, *pool.values)
    for piece in pieces:
        piece.fill_(float("nan"))
    tokens_of(engine, [random_prompt(20, seed=seed) for seed in range(3)], 3)
    for piece in pieces:
        assert int(piece.isfinite().all(-1).all(-1).sum()) == 3 * 22


def test_steps_with_layer_callbacks_run_without_a_graph(llama: Pair, device: torch.device) -> None:
    captures = Captures()
    engine, _ = graphed_engine(llama, captures, device)
    prompt = random_prompt(5)
    engine.execute([make_slice(prompt, 0, 4, [0])])
    layers: list[int] = []
    engine.execute([make_slice(prompt, 4, 5, [0])], layers.append)
    assert layers == [0, 1]
    assert captures.captured == 0


def test_missing_device_is_refused(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        llama.engine(device="cuda", **TRITON)
