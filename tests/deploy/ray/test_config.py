"""Tests of the YAML file of a Ray cluster: its options reach the processes, and errors name the wrong key."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonserve.conductor.config import ConductorConfig
from moonserve.deploy.launcher.process_specs import HostOptions, ProcessKind
from moonserve.deploy.ray.command import INSTALL, connect
from moonserve.deploy.ray.config import parse_cluster
from moonserve.deploy.ray.processes import PlannedProcess, addresses_of, process_spec, serve_config
from moonserve.deploy.terminal import EXIT_USAGE
from moonserve.protocol.errors import ConfigError
from tests.commands import Command
from tests.deploy.launcher.test_process_specs import parsed

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


def test_values_of_the_file_reach_the_configuration() -> None:
    config = parse_cluster(yaml.safe_load(WHOLE))
    assert config.namespace == "moonserve-chat"
    assert config.prefill.bundle() == {"CPU": 8.0, "GPU": 1.0, "prefill": 1.0}
    assert config.stores.bundle() == {"CPU": 1.0, "memory": 64 * 2.0**30}
    assert (config.decode.count, config.decode.min, config.decode.most) == (3, 1, 6)
    assert config.autoscale is not None
    assert (config.autoscale.high, config.autoscale.low, config.drain_s) == (0.8, 0.3, 60.0)
    serve = config.serve
    assert (serve.model, serve.served_model_name) == ("/models/qwen", ("chat", "chat-large"))
    assert (serve.dram, serve.enable_prefix_caching) == (64 * 2**30, False)
    assert not config.needs_directory


def test_options_of_vllm_are_a_list() -> None:
    assert parse_cluster({"serve": {"engine": "vllm", "vllm": ["enforce-eager", "a=1"]}}).serve.vllm[1] == "a=1"


def test_an_empty_mapping_is_the_demo_model_with_one_worker_of_each_kind() -> None:
    config = parse_cluster({})
    assert (config.prefill.count, config.decode.count, config.conductors.count) == (1, 1, 2)
    assert (config.needs_directory, config.autoscale) == (True, None)


def test_active_conductors_know_each_other_and_need_no_registry() -> None:
    config = parse_cluster({"conductors": {"active": 3}})
    assert (config.conductors.count, config.needs_directory) == (3, False)
    addresses = addresses_of(config, ("10.0.0.1", "10.0.0.2"), "10.0.0.1")
    site = HostOptions(conductor=addresses.conductors, host="10.0.0.2")
    unit = PlannedProcess(ProcessKind.CONDUCTOR, 1)
    made = parsed(process_spec(config, unit, serve_config(config, addresses), site, None))
    assert isinstance(made, ConductorConfig)
    assert made.own_shard() == f"10.0.0.2:{config.conductors.port + 1}"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "the file must hold keys and values"),
        ({"prefil": {}}, "unknown key 'prefil'; did you mean prefill?"),
        ({"prefill": {"gpu": 1}}, "unknown key 'prefill.gpu'; did you mean gpus?"),
        ({"prefill": {"count": "two"}}, "prefill.count: Input should be a valid integer"),
        ({"prefill": {"max": math.inf}}, "prefill.max: Input should be a finite number"),
        ({"prefill": {"count": 3, "max": 2}}, "prefill: 1 <= min"),
        ({"decode": {"resources": {"decode": "one"}}}, "decode.resources.decode: Input should"),
        ({"decode": {"cpus": 0}}, "decode: give cpus"),
        ({"decode": {"cpus": -1}}, "decode.cpus: Input should be greater than or equal to 0"),
        ({"stores": {"memory": "much"}}, "stores.memory: 'much' is not a size"),
        ({"stores": {"enabled": "maybe"}}, "stores.enabled: Input should be a valid boolean"),
        ({"name": "My Cluster"}, "name: "),
        ({"conductors": {"port": 65535}}, "conductors: port 65535 to 65536"),
        ({"autoscale": {"high": 0.2}}, "autoscale: low"),
        ({"serve": {"prefill_workers": 2}}, "give prefill.count"),
        ({"serve": {"blok_size": 2}}, "serve has no option 'blok_size'; did you mean block_size?"),
        ({"serve": {"block_size": "x"}}, "--block-size"),
        ({"silence_s": 0}, "silence_s"),
    ],
)
def test_an_invalid_value_is_reported_with_its_key(document: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_cluster(document)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", "not valid YAML"), ("prefil: {count: 2}", "did you mean"), (None, "cannot read")]
)
def test_an_invalid_file_is_reported_before_ray_is_contacted(
    tmp_path: Path, text: str | None, words: str, moonserve: Command
) -> None:
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    told = moonserve("deploy", "ray", "--address", "nowhere:1", str(path), ends=EXIT_USAGE).err
    assert words in told
    assert str(path) in told


def test_files_and_verbs_need_no_ray(moonserve: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    example = Path(__file__).parents[3] / "deploy" / "clusters" / "gpu.yaml"
    assert "gpu.yaml is valid" in moonserve("deploy", "ray", "--check", str(example), ends=0).out
    shown = moonserve("deploy", "--help", ends=0).out
    for verb in ("ray", "status", "logs", "scale", "restart", "drain", "down"):
        assert f"\n    {verb} " in shown
    for wrong in ([], ["scale"], ["frobnicate"], ["drain"]):
        assert "usage: moonserve deploy" in moonserve("deploy", *wrong, ends=EXIT_USAGE).err
    with pytest.raises(ConfigError) as raised:
        connect("auto")
    assert INSTALL in str(raised.value)


DOCUMENT = {
    "conductors": {"count": 2, "port": 7200},
    "prefill": {"cpus": 6.5},
    "gateways": {"count": 2},
    "drain_s": 20,
    "serve": {"block_size": 64, "host": "0.0.0.0", "port": 8080, "api_key": ["k1"]},
}
HOSTS = ("10.0.0.1", "10.0.0.2")
EVERYWHERE = "10.0.0.1:7200,10.0.0.1:7201,10.0.0.2:7200,10.0.0.2:7201"
REDIS = "redis://10.0.0.9:6379/0"


@pytest.mark.parametrize(
    ("kind", "number", "more", "expected"),
    [
        (ProcessKind.CONDUCTOR, 1, {},
         {"instance_id": "conductor-1", "host": "10.0.0.2", "port": 7201, "registry": "10.0.0.1:7090"}),
        (ProcessKind.CONDUCTOR, 0, {"registry": REDIS}, {"registry": REDIS}),
        (ProcessKind.CONDUCTOR, 0, {"conductors": {"count": 1}},
         {"instance_id": "conductor", "registry": None}),
        (ProcessKind.DIRECTORY, 0, {}, {"port": 7090, "registry": None}),
        (ProcessKind.STORE, 1, {}, {"instance_id": "store-1", "host": "10.0.0.2", "conductor": EVERYWHERE}),
        (ProcessKind.PREFILL, 3, {}, {"instance_id": "prefill-3", "num_threads": 6, "home_store": "store-1",
                               "drain_timeout_s": 20.0, "conductor": EVERYWHERE}),
        (ProcessKind.DECODE, 0, {}, {"num_threads": 1, "block_size": 64, "conductor": EVERYWHERE}),
        (ProcessKind.GATEWAY, 0, {}, {"host": "0.0.0.0", "port": 8080, "reuse_port": True, "api_key": ("k1",),
                               "conductor": EVERYWHERE}),
    ],
)  # fmt: skip
def test_processes_accept_the_flags_that_actors_pass(
    kind: ProcessKind, number: int, more: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Each process's own configuration class accepts the flags and yields the expected values."""
    document = parse_cluster({**DOCUMENT, **more})
    addresses = addresses_of(document, HOSTS, HOSTS[0])
    site = HostOptions(conductor=addresses.conductors, model_path="/model", host="10.0.0.2", drain_s=document.drain_s)
    serve = serve_config(document, addresses)
    made = process_spec(document, PlannedProcess(kind, number), serve, site, "store-1")
    config = parsed(made)
    assert {name: getattr(config, name) for name in expected} == expected
    assert not any("k1" in flag for flag in made.flags)
    assert kind not in (ProcessKind.PREFILL, ProcessKind.DECODE) or made.stop_grace_s > 20.0


def test_names_of_workers_that_may_change_roles_contain_no_role() -> None:
    config = parse_cluster({"serve": {"role_switching": "on"}})
    units = [PlannedProcess(kind, number) for kind in (ProcessKind.PREFILL, ProcessKind.DECODE) for number in range(2)]
    assert [unit.name(config) for unit in units] == ["worker-0", "worker-2", "worker-1", "worker-3"]
