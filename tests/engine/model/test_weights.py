"""Loads checkpoints: sharded or not, complete or refused with a list of what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonserve.engine.kv_cache.pool_size import weight_bytes
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.partition import split_into_shards
from moonserve.engine.model.weights import load_weights
from moonserve.protocol.errors import ConfigError
from tests.engine.conftest import Pair
from tests.random_models import make_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_model("llama", tmp_path, tie_word_embeddings=False)
    return tmp_path


def rewrite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def load(path: Path) -> str:
    return load_weights(path, load_model_config(path), torch.float32).digest


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    make_model("qwen3", single)
    make_model("qwen3", sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert load(single) == load(sharded)


def test_digest_depends_on_every_stored_byte(checkpoint: Path) -> None:
    before = load(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    rewrite(checkpoint, tensors)
    assert load(checkpoint) == before
    tensors["model.norm.weight"][3] += 1e-6
    rewrite(checkpoint, tensors)
    assert load(checkpoint) != before


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}},
        {"sliding_window": 8},
        {"rms_norm_eps": 1e-3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_digest_depends_on_the_configuration_of_keys_and_values(fields: dict[str, object], tmp_path: Path) -> None:
    """Blocks that a store kept from before YaRN was switched on in config.json belong to another model."""
    make_model("mistral", tmp_path)
    before = load(tmp_path)
    config = tmp_path / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"eos_token_id": 3}))
    assert load(tmp_path) == before
    config.write_text(json.dumps(content | fields))
    assert load(tmp_path) != before


def test_tensors_that_do_not_fit_are_listed_together(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.adapter.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(65)
    rewrite(checkpoint, tensors)
    with pytest.raises(ConfigError) as caught:
        load(checkpoint)
    assert "missing model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "unexpected model.layers.0.adapter.weight" in str(caught.value)
    assert "model.norm.weight [65] instead of [64]" in str(caught.value)
    rewrite(checkpoint, {"model.norm.weight": torch.zeros(64)})
    with pytest.raises(ConfigError, match=r"missing .* and \d+ more"):
        load(checkpoint)


def test_tied_models_may_store_their_head_twice(tmp_path: Path) -> None:
    make_model("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, tensors)
    weights = load_weights(tmp_path, load_model_config(tmp_path), torch.float32)
    assert weights.lm_head is weights.embedding


def test_deepseeks_layer_that_predicts_further_tokens_is_not_read(tmp_path: Path) -> None:
    make_model("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)})
    config = load_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32)
    layers = [each.numel() for layer in weights.layers for each in layer.projections if isinstance(each, torch.Tensor)]
    padding = 3 * 4 * (16 * 18 + 20 * 16)  # of the heads' rows to panels: 16 and 12 become 32
    matrices = weight_bytes(config, 1) - 2 * weights.embedding.numel()
    assert 0.95 * matrices < sum(layers) - padding < matrices, "and vectors"


def test_files_that_cannot_be_read_are_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load(checkpoint)
    file.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        load(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(ConfigError, match="not a safetensors index"):
        load(checkpoint)
    with pytest.raises(ConfigError, match="gguf"):
        load_weights(checkpoint, load_model_config(checkpoint), torch.float32, load_format="gguf")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_model("llama", tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize("variant", ["llama", "llama-biases-llama3", "qwen3-biases", "mixtral", "gpt-oss"])
def test_shards_together_are_the_whole_model(variant: str, pairs: dict[str, Pair]) -> None:
    """Each row and column is on one rank, biases of summed products on the first. The digest is the whole model's."""
    path = pairs[variant].path
    config = load_model_config(path)
    whole = load_weights(path, config, torch.float32)
    parts = [load_weights(path, config, torch.float32, shard=shard) for shard in split_into_shards(config, 2)]
    assert {part.digest for part in parts} == {whole.digest}
    assert torch.equal(torch.cat([part.lm_head for part in parts]), whole.lm_head)
    assert all(map(torch.equal, whole.sinks, map(torch.cat, zip(*(part.sinks for part in parts), strict=True))))
    for one, first, last in zip(whole.layers, parts[0].layers, parts[1].layers, strict=True):
        assert torch.equal(torch.cat([first.o, last.o], dim=1), one.o)
        for own, left, right in zip(one.mlps, first.mlps, last.mlps, strict=True):
            assert torch.equal(torch.cat([left.down, right.down], dim=1), own.down)
            halves = [part.gate_up.chunk(2) for part in (left, right)]
            ordered = [half[kind] for kind in (0, 1) for half in halves]
            assert torch.equal(torch.cat(ordered), own.gate_up)
            assert right.down_bias is None
        assert last.o_bias is None
        assert (first.o_bias is None) == (one.o_bias is None)
