"""Compares greedy tokens of small random models in float32 with transformers on the same device."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.report import Row, guarded, skipped
from benchmarks.harness.generate import generate
from moonserve.engine.engine import Engine
from moonserve.engine.model.config import load_model_config
from moonserve.protocol.request import SamplingParams

_SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # Large, so that greedy choices are not nearly tied.
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 48},
    "Qwen2": {},
    "Qwen3": {},
}


def families(bench: CheckContext) -> Iterator[Row]:
    for family in FAMILIES:
        name = f"{family}: tokens of transformers, float32"
        try:
            import transformers
        except ImportError:
            yield skipped(name, "transformers is not installed")
            continue
        yield guarded(name, partial(_compare, bench=bench, family=family, transformers=transformers))


def _compare(name: str, bench: CheckContext, family: str, transformers: Any) -> Row:
    torch.manual_seed(0)
    fields = {**_SMALL, **FAMILIES[family]}
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    lengths = (1, 17, 100) if bench.device.type != "cuda" else (1, 2, 16, 17, 100, 600)
    prompts = [[(7 * n + length) % 250 + 2 for n in range(length)] for length in lengths]
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        own = _own_tokens(bench, Path(folder), prompts)
    model = model.to(bench.device)
    peer = [_peer_tokens(bench, model, prompt) for prompt in prompts]
    equal = sum(one == other for one, other in zip(own, peer, strict=True))
    return Row(
        name=name,
        status="pass" if equal == len(prompts) else "fail",
        found=f"{equal} of {len(prompts)} prompts, {bench.scale.generated} tokens each",
        asked="all",
        reason="" if equal == len(prompts) else "tokens differ",
        figures={"equal": equal, "prompts": len(prompts)},
    )


def _own_tokens(bench: CheckContext, path: Path, prompts: list[list[int]]) -> list[list[int]]:
    config = load_model_config(path)
    engine = Engine.load(
        path,
        config=config,
        layout=config.kv_layout(16, "float32"),
        num_blocks=160,
        device=str(bench.device),
        kernels="triton",
        attention="triton",
    )
    sampling = SamplingParams(max_tokens=bench.scale.generated, temperature=0.0)
    return [one.token_ids for one in generate(engine, prompts, sampling, chunk_size=90)]


def _peer_tokens(bench: CheckContext, model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt], device=bench.device)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=bench.scale.generated,
        do_sample=False,
        eos_token_id=None,
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found
