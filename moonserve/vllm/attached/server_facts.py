"""What a running vLLM server tells about itself and its load: `/v1/models`, `/metrics`, and its model's config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from moonserve.protocol.errors import ConfigError
from moonserve.vllm.kv.settings import model_identity
from moonserve.vllm.serving.model_description import EngineFacts, fingerprint, layout
from moonserve.vllm.serving.service import EngineFigures

_CACHE = "vllm:cache_config_info"
_USAGE = "vllm:kv_cache_usage_perc"
_COUNTS = {  # field of EngineFigures by metric
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:prefix_cache_hits_total": "num_hit_tokens",
    "vllm:external_prefix_cache_hits_total": "num_loaded_tokens",
}


def facts_of(
    card: Mapping[str, Any], metrics: str, model: str, config: Mapping[str, Any], max_num_seqs: int
) -> EngineFacts:
    """Returns the facts of a server. `card`: its entry of /v1/models; `config`: the model's config.json. Raises
    ConfigError if something is missing."""
    cache = next((sample.labels for sample in _samples(metrics, [_CACHE])), None)
    if cache is None:
        raise ConfigError(f"the vLLM server has no {_CACHE} at /metrics: start it without --disable-log-stats")
    text: Mapping[str, Any] = config.get("text_config", config)
    try:
        heads = int(text["num_attention_heads"])
        block_size, cache_dtype = int(cache["block_size"]), cache["cache_dtype"]
        return EngineFacts(
            fingerprint=fingerprint("attached", model_identity(model, None, config), cache_dtype, block_size),
            layout=layout(
                num_layers=int(text["num_hidden_layers"]),
                block_size=block_size,
                num_kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
                dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
                cache_dtype=cache_dtype,
            ),
            num_blocks=max(1, int(cache["num_gpu_blocks"]) - 1),  # vLLM keeps one for itself
            vocab_size=int(text["vocab_size"]),
            max_model_len=int(card["max_model_len"]),
            max_num_seqs=max_num_seqs,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the vLLM server or its model's config.json lacks {error}") from error


def model_config(model: str) -> dict[str, Any]:
    """Returns the config.json of a local folder or a model of the hub. Raises ConfigError."""
    try:
        if Path(model).is_dir():
            path = Path(model) / "config.json"
        else:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        found: dict[str, Any] = json.loads(path.read_text())
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"the config.json of {model} cannot be read; name its folder with --model: {error}"
        ) from error
    return found


def update_figures(figures: EngineFigures, metrics: str) -> None:
    """Takes the figures from the text of /metrics. Those of several engines are added; of usage the highest counts."""
    totals = dict.fromkeys(_COUNTS.values(), 0)
    usage = 0.0
    for sample in _samples(metrics, [_USAGE, *_COUNTS]):
        if sample.name == _USAGE:
            usage = max(usage, sample.value)
        else:
            totals[_COUNTS[sample.name]] += int(sample.value)
    figures.kv_usage = usage
    for name, value in totals.items():
        setattr(figures, name, value)


def _samples(metrics: str, names: Iterable[str]) -> Iterator[Sample]:
    """Yields the samples with these names. The others, hundreds of them, are not parsed."""
    wanted = tuple(f"{name}{{" for name in names)
    lines = "\n".join(line for line in metrics.splitlines() if line.startswith(wanted))
    families: Iterable[Metric] = text_string_to_metric_families(f"{lines}\n")
    for family in families:
        yield from family.samples
