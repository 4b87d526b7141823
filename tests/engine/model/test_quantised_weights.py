"""A model with quantised weights is the model of the weights that its codes stand for, in every division of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.generate import generate
from moonserve.engine.engine import Engine
from moonserve.engine.kernels.weight_packing import Compact
from moonserve.engine.kv_cache.pool_size import weight_bytes
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.partition import split_into_shards, split_into_stages
from moonserve.engine.model.weights import load_weights
from moonserve.engine.model.weights.layer_weights import QUANTISED_FORMATS
from moonserve.engine.model.weights.quantised_matrix import QuantisedMatrix, WeightFormat, rounded
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import SamplingParams
from tests.engine.conftest import LATENTS, Pair
from tests.engine.model.test_quantised_checkpoints import MATRICES, fused
from tests.engine.steps import random_prompt, tokens_of
from tests.random_models import make_model

NAMES = list(QUANTISED_FORMATS)
NATIVE = {"kernels": "native", "attention": "native"}


def logprobs_of(engine: Engine, prompt: list[int], chunk_size: int) -> tuple[list[int], torch.Tensor]:
    """Returns ten greedy tokens, and the log-probabilities of the two best ones at each place."""
    sampling = SamplingParams(max_tokens=10, temperature=0.0, num_logprobs=2)
    [result] = generate(engine, [prompt], sampling, chunk_size=chunk_size)
    top = [[value for _, value in one.top] for one in result.logprobs if one is not None]
    return result.token_ids, torch.tensor(top)


@pytest.mark.parametrize("quantise", NAMES)
@pytest.mark.parametrize("name", ["llama", "llama-biases-llama3", "qwen2", "qwen3-yarn", "deepseek-v2-groups"])
def test_model_equals_the_model_of_its_rounded_weights(
    name: str, quantise: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs lose 2⁻¹⁶ of their group's highest magnitude; in these models, log-probabilities are off by less than
    2⁻⁹. The reference computes with plain weights; latent attention is native there too."""
    pair, bound, is_latent = pairs[name], 2.0**-9, name in LATENTS
    native = pair.engine(quantise=quantise, **NATIVE)
    monkeypatch.setattr("moonserve.engine.engine.keeps_integers", lambda *_: False)
    reference = pair.engine(quantise=quantise, kernels="native" if is_latent else "torch")
    assert (native.kernels_name, reference.kernels_name) == ("native", "native" if is_latent else "torch")
    for seed in range(6):
        prompt = random_prompt(5 + 20 * seed, seed)
        found, top = logprobs_of(native, prompt, 32)
        expected, true_top = logprobs_of(reference, prompt, 32)
        clear = int(((true_top[:, 0] - true_top[:, 1]) > 2 * bound).long().cumprod(0).sum())
        assert found[:clear] == expected[:clear]
        assert (top - true_top)[:clear].abs().max() < bound
    assert clear > 5, "the prompts have clear choices"


@pytest.mark.parametrize("quantise", NAMES)
def test_every_matrix_of_the_layers_and_the_head_is_rounded(quantise: str, tmp_path: Path) -> None:
    """The embedding, norms and biases stay as they are, and so does the digest of other models."""
    make_model("qwen2", tmp_path)
    config = load_model_config(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name, tensor in stored.items():
        matrix = name.endswith("proj.weight") or name == "lm_head.weight"
        format = WeightFormat(8, 128) if "head" in name else QUANTISED_FORMATS[quantise]
        expected[name] = rounded(tensor, format) if matrix else tensor
        assert torch.equal(expected[name], tensor) != matrix
    weights = load_weights(tmp_path, config, torch.float32, quantise=quantise)
    for found, names in zip(weights.layers[1].projections, MATRICES, strict=True):
        assert torch.equal(found, fused(expected, 1, *names))
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head, expected["lm_head.weight"])
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert len({load_weights(tmp_path, config, torch.float32, quantise=each).digest for each in ("auto", *NAMES)}) == 3


def test_kv_of_quantised_weights_is_another_models(llama: Pair) -> None:
    """Fingerprints differ by format, and are equal whether the kernels keep integers or not."""
    prints = {each: llama.engine(quantise=each).fingerprint for each in ("auto", *NAMES)}
    assert len(set(prints.values())) == 3
    assert llama.engine(quantise="int4", **NATIVE).fingerprint == prints["int4"]


@pytest.mark.parametrize(("quantise", "bits"), [("int4", 4.5), ("int8", 8.125)])
def test_weights_are_held_once_in_the_bytes_of_their_format(quantise: str, bits: float, tmp_path: Path) -> None:
    make_model("llama", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=320)
    config = load_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.bfloat16, quantise=quantise, keeps_integers=True)
    layers, head = 2 * (128 * 256 + 128 * 128 + 3 * 128 * 256), 320 * 128
    assert all(isinstance(matrix, QuantisedMatrix) for matrix in weights.projections)
    held_bytes = sum(matrix.nbytes for matrix in weights.projections)
    assert held_bytes == (layers * bits + head * 8.125) / 8
    expected = weight_bytes(config, 2, quantise) - weights.embedding.nbytes
    assert 0.9 * expected < held_bytes <= expected, "and a few vectors"
    engine = Pair(tmp_path, None).engine(dtype="bfloat16", quantise=quantise, kernels="auto")  # type: ignore[arg-type]
    assert engine.kernels_name == "native", "no kernels beside them that need plain weights"
    packed = engine._model._kernels._layers[0]  # type: ignore[attr-defined]
    assert not any(isinstance(each.panels, torch.Tensor | Compact) for each in (*packed.matrices[:2], *packed.owners))


@pytest.mark.parametrize("quantise", NAMES)
def test_threads_and_chunks_do_not_change_tokens(quantise: str, pairs: dict[str, Pair]) -> None:
    prompts = [random_prompt(length, length) for length in (1, 33, 150)]
    alone = pairs["qwen3-moe"].engine(quantise=quantise, dtype="bfloat16", **NATIVE)
    shared = pairs["qwen3-moe"].engine(quantise=quantise, dtype="bfloat16", num_threads=3, **NATIVE)
    expected = tokens_of(alone, prompts, 12)
    assert tokens_of(shared, prompts, 12, chunk_size=7) == expected
    assert [tokens_of(shared, [prompt], 12)[0] for prompt in prompts] == expected


def rows_of(matrix: Any) -> torch.Tensor:
    """Returns the codes of all panels, as one tensor per output."""
    panels, lanes = matrix._places(0, matrix.outputs)
    return torch.cat((matrix.codes[panels, :, lanes], matrix.scales[panels, :, lanes].view(torch.int16).int()), 1)


@pytest.mark.parametrize("quantise", NAMES)
def test_ranks_and_stages_have_their_parts_of_the_model(quantise: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path, hidden_size=128, intermediate_size=512, head_dim=64, tie_word_embeddings=True)
    config = load_model_config(tmp_path)

    def load(**part: Any) -> Any:
        return load_weights(tmp_path, config, torch.float32, quantise=quantise, keeps_integers=True, **part)

    whole, ranks = load(), [load(shard=shard) for shard in split_into_shards(config, 2)]
    assert torch.equal(torch.cat([rows_of(rank.lm_head) for rank in ranks]), rows_of(whole.lm_head))
    gates = [rows_of(rank.layers[1].mlps[0].gate_up).chunk(2) for rank in ranks]
    assert torch.equal(torch.cat([part[n] for n in (0, 1) for part in gates]), rows_of(whole.layers[1].mlps[0].gate_up))
    words = [rank.layers[1].mlps[0].down.words for rank in ranks]
    downs = [rows_of(rank.layers[1].mlps[0].down)[:, : words[0]] for rank in ranks]
    assert torch.equal(torch.cat(downs, 1), rows_of(whole.layers[1].mlps[0].down)[:, : sum(words)])
    first, last = (load(stage=stage) for stage in split_into_stages(2, 2))
    assert torch.equal(rows_of(first.layers[0].qkv), rows_of(whole.layers[0].qkv))
    assert torch.equal(rows_of(last.layers[0].qkv), rows_of(whole.layers[1].qkv))
    assert torch.equal(rows_of(last.lm_head), rows_of(whole.lm_head))
    assert (len(first.lm_head), len(last.embedding)) == (0, 0)
    assert len({each.digest for each in (whole, *ranks, first, last)}) == 1


def test_ranks_that_would_cut_groups_are_refused(llama: Pair) -> None:
    config = load_model_config(llama.path)  # heads of 16: a rank has 32 columns of o_proj, and 48 of down_proj
    with pytest.raises(ConfigError, match="groups of 32 weights do not divide the 48 columns of mlp"):
        load_weights(llama.path, config, torch.float32, quantise="int4", shard=split_into_shards(config, 2)[1])


def test_unknown_formats_and_devices_are_refused(llama: Pair) -> None:
    with pytest.raises(ConfigError, match="int3"):
        llama.engine(quantise="int3")
    with pytest.raises(ConfigError, match="--quantize int4 is for CPUs only"):
        llama.engine(quantise="int4", kernels="triton")
