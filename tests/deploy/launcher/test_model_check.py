"""A model that cannot be served is refused by its config.json, before weights are downloaded, with what would work."""

import json
from pathlib import Path
from typing import Any

import pytest

from moonserve.deploy.launcher import model_check
from moonserve.deploy.launcher.config import ServeConfig
from moonserve.deploy.launcher.model_check import model_folder
from moonserve.models import demo_model_path
from moonserve.protocol.errors import ConfigError

REFUSED = [
    ({"architectures": ["LlamaForSequenceClassification"]}, {}, r"no decoder of transformers; .*--engine vllm"),
    ({"quantization_config": {"quant_method": "awq", "bits": 3}}, {}, r"quantised by awq .*--engine vllm.*bfloat16"),
    ({"quantization_config": {"weight_block_size": [128, 128]}}, {}, "an unnamed method"),
    ({}, {"max_model_len": 1_000_000}, r"--max-model-len 1000000 exceeds the model's 8192 positions"),
    ({"num_hidden_layers": 10**7}, {}, r"2 workers need \d+\.\d GiB, each at least .*: choose a smaller model"),
    ({}, {"kv_cache_memory": 2**50}, "1048576.0 GiB for KV"),
    ({"num_hidden_layers": 10**7}, {"quantize": "int4"}, "for weights in int4"),
]


@pytest.mark.parametrize(("fields", "options", "message"), REFUSED)
def test_a_hub_model_is_refused_before_its_weights_are_downloaded(
    fields: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((demo_model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    downloads: list[list[str]] = []

    def download(_name: str, *, allow_patterns: list[str]) -> str:
        downloads.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match=message):
        model_folder(ServeConfig(model="someone/model", **options))
    assert downloads == [["config.json", "generation_config.json"]]
    if not options:
        assert model_folder(ServeConfig(model="someone/model", engine="vllm")) == tmp_path
        assert any("safetensors" in pattern for pattern in downloads[-1])


def test_memory_of_other_hosts_and_unknown_memory_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(kv_cache_memory=2**50)
    assert model_folder(config, is_one_host=False) == demo_model_path()
    monkeypatch.setattr(model_check, "available_memory_bytes", lambda: None)
    assert model_folder(config) == demo_model_path()
