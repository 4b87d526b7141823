"""The processes of a cluster on one machine and their options."""

from __future__ import annotations

from pathlib import Path

import pytest

from conductor.config import ConductorConfig
from decode_worker.config import DecodeConfig
from deploy.config import STOP_GRACE_S, ServeConfig
from deploy.plan import ProcessSpec, conductor_spec, member_specs
from deploy.undivided.config import UndividedConfig
from deploy.worker.config import WorkerConfig
from engine.elastic.config import LedgerConfig
from gateway.config import GatewayConfig
from kvstore.config import StoreConfig
from prefill_worker.config import PrefillConfig
from protocol.config import load, options_of
from protocol.errors import ConfigError
from protocol.process import ProcessConfig

CLASSES: dict[str, type[ProcessConfig]] = {
    "conductor": ConductorConfig,
    "kvstore": StoreConfig,
    "prefill_worker": PrefillConfig,
    "decode_worker": DecodeConfig,
    "deploy.worker": WorkerConfig,
    "deploy.undivided": UndividedConfig,
    "gateway": GatewayConfig,
}


def parsed(spec: ProcessSpec) -> ProcessConfig:
    """The configuration that the process itself would build."""
    return load(CLASSES[spec.module], spec.flags, prog=spec.module, environ=spec.environment)


def members(**options: object) -> dict[str, ProcessSpec]:
    config = ServeConfig(**options)  # type: ignore[arg-type]
    return {s.instance_id: s for s in member_specs(config, "/model", "127.0.0.1:5")}


def test_the_default_cluster_has_one_process_of_each_kind() -> None:
    assert set(members()) == {"store-0", "prefill-0", "decode-0", "gateway-0"}


def test_every_process_understands_its_flags_and_gets_the_shared_options() -> None:
    options = {"block_size": 64, "transports": ("tcp",), "log_format": "json", "port": 1234}
    specs = [conductor_spec(ServeConfig(**options)), *members(**options).values()]  # type: ignore[arg-type]
    for spec in specs:
        config = parsed(spec)
        assert config.instance_id == spec.instance_id
        assert config.log_format == "json"
        assert config.port == (1234 if spec.module == "gateway" else 0)
        if spec.module.endswith("worker"):
            assert getattr(config, "block_size") == 64  # noqa: B009
            assert config.transports == ("tcp",)


def test_every_option_of_serve_reaches_a_process_or_is_the_launchers_own() -> None:
    launchers = {"conductors", "prefill_workers", "decode_workers", "store_nodes", "log_dir"}
    launchers |= {"prefill_tensor_parallel_size", "decode_tensor_parallel_size", "gateways"}
    known = {option.name for cls in CLASSES.values() for option in options_of(cls)}
    assert {option.name for option in options_of(ServeConfig)} <= known | launchers


def test_several_gateways_share_the_port_and_one_has_it_alone() -> None:
    specs = members(gateways=2, port=1234)
    found = [parsed(specs[f"gateway-{number}"]) for number in range(2)]
    assert [(config.port, config.reuse_port) for config in found] == [(1234, True)] * 2
    assert not parsed(members()["gateway-0"]).reuse_port


def test_prefill_workers_are_dealt_out_over_the_store_nodes() -> None:
    specs = members(prefill_workers=3, store_nodes=2)
    homes = [getattr(parsed(specs[f"prefill-{n}"]), "home_store") for n in range(3)]  # noqa: B009
    assert homes == ["store-0", "store-1", "store-0"]


def test_a_cluster_without_store_nodes_has_no_home_store() -> None:
    specs = members(store_nodes=0)
    assert "--home-store" not in specs["prefill-0"].flags


def store_configs(**options: object) -> list[StoreConfig]:
    specs = [spec for spec in members(**options).values() if spec.module == "kvstore"]
    configs = [parsed(spec) for spec in specs]
    return [config for config in configs if isinstance(config, StoreConfig)]


def test_a_single_store_node_has_the_disk_as_it_was_given() -> None:
    [store] = store_configs(
        ssd="/mnt/kv:4GiB",
        ssd_key_file="/run/key",
        ssd_write_through=True,
        ssd_flush_s=7.5,
        tenant_quota=("alice=2GiB", "bob=1MiB"),
    )
    assert store.ssd_folder() == (Path("/mnt/kv"), 4 * 2**30)
    assert (store.ssd_key_file, store.ssd_write_through, store.ssd_flush_s) == (
        "/run/key",
        True,
        7.5,
    )
    assert store.quotas() == {"alice": 2 * 2**30, "bob": 2**20}


def test_several_store_nodes_have_folders_of_their_own() -> None:
    stores = store_configs(store_nodes=2, ssd="/mnt/kv/:4GiB")
    folders = [store.ssd_folder() for store in stores]
    assert folders == [
        (Path("/mnt/kv/store-0"), 4 * 2**30),
        (Path("/mnt/kv/store-1"), 4 * 2**30),
    ]


def test_only_a_store_node_with_a_disk_gets_time_to_write_at_the_stop() -> None:
    graces = {s.instance_id: s.stop_grace_s for s in members(ssd="d:1GiB").values()}
    assert graces.pop("store-0") == STOP_GRACE_S + ServeConfig().ssd_flush_s
    assert set(graces.values()) == {STOP_GRACE_S}
    assert members()["store-0"].stop_grace_s == STOP_GRACE_S
    # All are ended side by side, by force after their graces (test_supervisor): serve promises an end within 5 s.
    assert STOP_GRACE_S < 5


def test_disk_options_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('ssd = "/from/file:1GiB"\nssd_flush_s = 3.0\ntenant_quota = ["a=1GiB"]\n')
    environ = {"MOONSERVE_SSD": "/from/environment:2GiB", "MOONSERVE_SSD_WRITE_THROUGH": "1"}
    argv = ["--config", str(file), "--ssd-flush-s", "5"]
    config = load(ServeConfig, argv, prog="serve", environ=environ)
    assert config.ssd == "/from/environment:2GiB"
    assert (config.ssd_write_through, config.ssd_flush_s) == (True, 5.0)
    assert config.tenant_quota == ("a=1GiB",)


def test_api_keys_are_no_flags() -> None:
    spec = members(api_key=("k1", "k2"))["gateway-0"]
    assert not any("k1" in flag for flag in spec.flags)
    assert spec.environment == {"MOONSERVE_API_KEY": "k1,k2"}


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_workers": 0},
        {"store_nodes": -1},
        {"port": 70000},
        {"block_size": 0},
        {"dram": 1},
        {"ssd": "/mnt/kv"},
        {"ssd": "/mnt/kv:much"},
        {"ssd": "/mnt/kv:1GiB", "store_nodes": 0},
        {"ssd_flush_s": -1.0},
        {"tenant_quota": ("alice",)},
        {"gpu_memory_utilization": 1.5},
        {"async_scheduling": True, "elastic_kv_memory": True},
        {"async_scheduling": True, "conditional_disaggregation": "on"},
    ],
)
def test_impossible_clusters_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ServeConfig(**options)  # type: ignore[arg-type]


def test_decode_workers_that_prefill_know_the_objective_and_a_home_store() -> None:
    options = {"decode_workers": 2, "conditional_disaggregation": "on", "tbt_slo": 0.3}
    specs = members(**options, store_nodes=2)
    decodes = [parsed(specs[f"decode-{i}"]) for i in range(2)]
    assert all(isinstance(each, UndividedConfig) and each.tbt_slo == 0.3 for each in decodes)
    assert [getattr(each, "home_store") for each in decodes] == ["store-0", "store-1"]  # noqa: B009


def test_gpus_are_dealt_out_to_workers_who_share_their_memory() -> None:
    """Three workers on two GPUs; each process sees its own only."""
    config = ServeConfig(decode_workers=2, gpu_memory_utilization=0.8)
    specs = {s.instance_id: s for s in member_specs(config, "/model", "c:1", gpus=("0", "3"))}
    seen = {
        name: (spec.environment["CUDA_VISIBLE_DEVICES"], parsed(spec).gpu_memory_utilization)  # type: ignore[attr-defined]
        for name, spec in specs.items()
        if spec.module.endswith("worker")
    }
    assert seen == {"prefill-0": ("0", 0.4), "decode-0": ("3", 0.8), "decode-1": ("0", 0.4)}
    assert "CUDA_VISIBLE_DEVICES" not in specs["store-0"].environment


@pytest.mark.parametrize(("device", "gpus"), [("cpu", ("0",)), ("auto", ())])
def test_workers_on_processors_see_what_they_saw(device: str, gpus: tuple[str, ...]) -> None:
    specs = member_specs(ServeConfig(device=device), "/model", "c:1", gpus=gpus)
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for spec in specs)


def test_workers_that_may_change_have_names_without_a_role() -> None:
    options = {"prefill_workers": 1, "decode_workers": 2, "role_switching": "on", "store_nodes": 2}
    specs = members(**options)
    assert set(specs) == {"store-0", "store-1", "worker-0", "worker-1", "worker-2", "gateway-0"}
    workers = [parsed(specs[f"worker-{i}"]) for i in range(3)]
    assert all(isinstance(worker, WorkerConfig) for worker in workers)
    assert [worker.role for worker in workers] == ["prefill", "decode", "decode"]
    assert [worker.home_store for worker in workers] == ["store-0", "store-1", "store-0"]


def test_prefill_workers_can_be_groups() -> None:
    """Without a store of their own, since no stage has whole blocks; with the cores shared by all that compute."""
    specs = members(pipeline_parallel_size=2, num_threads=None)
    config = parsed(specs["prefill-0"])
    assert isinstance(config, PrefillConfig)
    assert config.pipeline_parallel_size == 2
    assert config.home_store is None
    with pytest.raises(ConfigError, match="--role-switching"):
        ServeConfig(pipeline_parallel_size=2, role_switching="on")


def test_workers_of_either_kind_can_have_ranks_of_their_own_number() -> None:
    """Each rank has a thread at least, however few cores there are."""
    specs = members(tensor_parallel_size=2, decode_tensor_parallel_size=64)
    prefill, decode = parsed(specs["prefill-0"]), parsed(specs["decode-0"])
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (2, 64)
    assert prefill.num_threads >= 2
    assert decode.threads_per_rank >= 1
    switching = members(tensor_parallel_size=2, role_switching="on")
    assert getattr(parsed(switching["worker-0"]), "tensor_parallel_size") == 2  # noqa: B009


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"decode_tensor_parallel_size": 4, "num_threads": 2}, "below the 4 ranks"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"prefill_tensor_parallel_size": 2, "role_switching": "on"}, "--role-switching"),
    ],
)
def test_ranks_that_cannot_be_had_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeConfig(**options)  # type: ignore[arg-type]


def test_workers_share_a_budget_by_one_file_and_each_can_always_have_some_of_it() -> None:
    config = ServeConfig(kv_memory_budget=800, prefill_workers=2, decode_workers=2)
    specs = {s.instance_id: s for s in member_specs(config, "/model", "127.0.0.1:5", "/shares")}
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        worker = parsed(specs[name])
        assert isinstance(worker, LedgerConfig)
        assert worker.is_elastic
        assert (worker.kv_memory_budget, worker.kv_memory_floor) == (800, 50)
        assert worker.kv_memory_ledger == "/shares"
    shared = ServeConfig(kv_memory_budget=800, kv_memory_ledger="/ours", kv_memory_floor=7)
    [decode] = [
        parsed(s)
        for s in member_specs(shared, "/model", "127.0.0.1:5", "/shares")
        if s.instance_id == "decode-0"
    ]
    assert isinstance(decode, LedgerConfig)
    assert (decode.kv_memory_ledger, decode.kv_memory_floor) == ("/ours", 7)


@pytest.mark.parametrize(
    "options",
    [
        {"elastic_kv_memory": True, "transports": ("rdma", "tcp")},
        {"elastic_kv_memory": True, "pipeline_parallel_size": 2},
        {"kv_memory_budget": 100, "kv_memory_floor": 51},
        {"kv_memory_ledger": "/shares"},
    ],
)
def test_memory_that_cannot_be_elastic_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"kv-memory|elastic"):
        ServeConfig(**options)  # type: ignore[arg-type]
