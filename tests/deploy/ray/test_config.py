"""The YAML of a cluster on Ray: what it says arrives, and what is wrong is told with the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.ray.config import load_cluster, parse_cluster
from protocol.errors import ConfigError

WHOLE = """
name: chat
model: /models/qwen
registry: redis://10.0.0.9:6379/0
conductors: {count: 2, port: 7200, cpus: 0.5}
gateways: {count: 2}
stores: {cpus: 1, memory: 64GiB}
prefill: {count: 2, min: 1, max: 4, cpus: 8, gpus: 1, resources: {prefill: 1}}
decode: {count: 3, max: 6, cpus: 4, resources: {decode: 1}}
autoscale: {high: 0.8, low: 0.3}
drain-s: 60
serve:
  served-model-name: [chat, chat-large]
  dram: 64GiB
  enable_prefix_caching: false
  block_size: 64
"""


def test_what_the_file_says_arrives() -> None:
    config = parse_cluster(yaml.safe_load(WHOLE))
    assert config.namespace == "moonserve-chat"
    assert config.prefill.bundle() == {"CPU": 8.0, "GPU": 1.0, "prefill": 1.0}
    assert config.stores.bundle() == {"CPU": 1.0, "memory": 64 * 2.0**30}
    assert (config.decode.count, config.decode.min, config.decode.most) == (3, 1, 6)
    assert config.drain_s == 60.0
    assert config.autoscale is not None
    assert (config.autoscale.high, config.autoscale.low) == (0.8, 0.3)
    assert config.serve.model == "/models/qwen"
    assert config.serve.served_model_name == ("chat", "chat-large")
    assert config.serve.dram == 64 * 2**30
    assert not config.serve.enable_prefix_caching
    assert not config.needs_directory


def test_an_empty_mapping_is_the_demo_model_with_one_worker_of_each_kind() -> None:
    config = parse_cluster({})
    assert (config.prefill.count, config.decode.count, config.conductors.count) == (1, 1, 2)
    assert config.needs_directory
    assert config.autoscale is None


def test_a_document_for_serve_deploy_is_read_by_its_args() -> None:
    application = {"name": "chat", "import_path": "x:y", "args": yaml.safe_load(WHOLE)}
    assert parse_cluster({"applications": [application]}) == parse_cluster(yaml.safe_load(WHOLE))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "the file must hold keys and values"),
        ({"prefil": {}}, "unknown key 'prefil'; did you mean prefill?"),
        ({"prefill": {"gpu": 1}}, "unknown key 'prefill.gpu'; did you mean gpus?"),
        ({"prefill": {"count": "two"}}, "prefill.count must be a whole number"),
        ({"prefill": {"count": True}}, "prefill.count must be a whole number"),
        ({"prefill": {"max": math.inf}}, "prefill.max must be a whole number"),
        ({"decode": {"min": math.nan}}, "decode.min must be a whole number"),
        ({"prefill": {"count": 3, "max": 2}}, "prefill: 1 <= min"),
        ({"decode": {"resources": {"decode": "one"}}}, "decode.resources.decode must be a number"),
        ({"decode": {"cpus": 0}}, "decode: give cpus"),
        ({"decode": {"cpus": -1}}, "decode: cpus, gpus, memory and resources must not be negative"),
        ({"stores": {"memory": "much"}}, "stores.memory: 'much' is not a size"),
        ({"stores": {"enabled": "no"}}, "stores.enabled must be true or false"),
        ({"name": "My Cluster"}, "small letters"),
        ({"conductors": {"port": 65535}}, "conductors: port 65535 to 65536"),
        ({"autoscale": {"high": 0.2}}, "autoscale: low"),
        ({"serve": {"prefill_workers": 2}}, "prefill.count here"),
        ({"serve": {"blok_size": 2}}, "serve has no option 'blok_size'; did you mean block_size?"),
        ({"serve": {"block_size": "x"}}, "--block-size"),
        ({"applications": []}, "a list of one"),
        ({"silence_s": 0}, "silence_s"),
    ],
)
def test_what_is_wrong_is_told_with_the_key(document: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_cluster(document)
    assert words in str(raised.value)


@pytest.mark.parametrize(("text", "words"), [("a: [", "not valid YAML"), ("x: 1", "unknown key")])
def test_an_error_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        load_cluster(path)
    assert str(path) in str(raised.value)
    with pytest.raises(ConfigError, match="cannot read"):
        load_cluster(tmp_path / "absent.yaml")
