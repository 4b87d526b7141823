"""Decoders of no own family: tokens over the paged KV equal those of transformers for every type in docs/models.md, and
a model whose attention cannot be replaced is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.harness.generate import generate
from moonserve.engine.engine import Engine
from moonserve.engine.model.transformers_config import read_config
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
LISTED = re.findall(r"`([\w-]+)`[,.]", PAGE.read_text().partition("test_transformers_model.py")[2])
OFTEN = {"deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "olmo2", "phi3", "qwen3_moe"}  # one of each kind

SMALL: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 20},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "pad_token": 1, "initializer_range": 0.2},
    **{"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 96, "ffn_hidden_size": 96},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 48},
    **{"shared_expert_intermediate_size": 48, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 12},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "decoder_sparse_step": 2},
}
PROMPTS = [[(7 * n + length) % 250 + 2 for n in range(length)] for length in (1, 17, 60)]


def make_small(name: str, path: Path) -> Any:
    """Writes a small random model of a type and returns it."""
    text = CONFIG_MAPPING[name]().get_text_config()
    latent = {"num_key_value_heads": 4, "head_dim": 8} if hasattr(text, "kv_lora_rank") else {}
    fields = {key: value for key, value in (SMALL | latent).items() if hasattr(text, key)}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(type(text)(**fields)).eval()
    with torch.no_grad():
        for matrix in (each for each in model.parameters() if each.dim() > 1):
            matrix.normal_(0, 0.2)
    model.save_pretrained(path)
    return model


def load(path: Path, **options: Any) -> Engine:
    config = read_config(path)
    return Engine.load(path, config=config, layout=config.kv_layout(16, "float32"), num_blocks=64, **options)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.slow]) for n in LISTED])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_small(name, tmp_path)
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    engine = load(tmp_path)
    if getattr(model.config, "kv_lora_rank", None):
        assert (engine.layout.num_kv_heads, engine.layout.head_dim) == (1, 12), (
            "half of 16 + 8: latents and rotated keys"
        )
    found = [each.token_ids for each in generate(engine, PROMPTS, sampling, chunk_size=25)]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        given = torch.tensor([prompt])
        expected = model.generate(given, attention_mask=torch.ones_like(given), **options)[0, len(prompt) :]
        assert tokens == expected.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [("roberta", "not causal"), ("diffllama", "logits differ"), ("qwen3_next", "linear_attention"), ("gptj", "gptj")],
)
def test_a_model_that_would_give_other_tokens_is_refused(name: str, message: str, tmp_path: Path) -> None:
    make_small(name, tmp_path)
    with pytest.raises(ConfigError, match=rf"(?is){message}.*--engine vllm"):
        load(tmp_path)


def test_missing_weights_and_options_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    make_small("olmo2", tmp_path)
    for options in ({"kernels": "native"}, {"device": "cpu-staged"}):
        with pytest.raises(ConfigError, match="--kernels auto, --device cpu"):
            load(tmp_path, **options)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing or misshapen: model\.norm\.weight"):
        load(tmp_path)
