"""Tests of the processes of a cluster on one machine and of their options."""

from pathlib import Path
from typing import Any

import pytest

from moonserve.__main__ import SERVERS
from moonserve.__main__ import load as named
from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.placement.policies import PUBLISHED_POLICY
from moonserve.deploy.launcher.config import STOP_GRACE_S, WORKER_NICE, ServeConfig
from moonserve.deploy.launcher.process_specs import ProcessKind, ProcessSpec, conductor_spec, member_specs
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import load_config, options_of
from moonserve.traces.experiments.simulate import SimulateConfig


def parsed(spec: ProcessSpec) -> Any:
    """Returns the configuration that the process itself builds from its flags and environment."""
    command = " ".join(spec.argv[2:])
    return load_config(named(SERVERS[command][0]), spec.flags, prog=command, environ=spec.environment)


def members(gpus: tuple[str, ...] = (), ledger: str | None = None, **options: Any) -> dict[str, ProcessSpec]:
    specs = member_specs(ServeConfig(**options), "/model", "127.0.0.1:5", ledger, gpus, core_table=9)
    return {spec.instance_id: spec for spec in specs}


# Options of serve, and by process the resulting values of its own configuration.
ARRIVES: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = [
    ({"gateways": 2, "port": 1234}, {name: {"port": 1234, "reuse_port": True} for name in ("gateway-0", "gateway-1")}),
    ({}, {"gateway-0": {"reuse_port": False}, "prefill-0": {"home_store": "store-0"}}),
    ({"store_nodes": 0, "lend_cores": "off"}, {"prefill-0": {"home_store": None, "shared_cores": None}}),
    ({}, {"prefill-0": {"shared_cores": "/proc/self/fd/9:0"}, "decode-0": {"shared_cores": "/proc/self/fd/9:1"}}),
    ({"num_threads": 1}, {"prefill-0": {"shared_cores": None}}),
    ({"prefill_workers": 3, "store_nodes": 2}, {f"prefill-{n}": {"home_store": f"store-{n % 2}"} for n in range(3)}),
    (
        {"ssd": "/mnt/kv:4GiB", "ssd_write_through": True, "tenant_quota": ("a=2GiB", "b=1MiB")},
        {"store-0": {"ssd": "/mnt/kv:4GiB", "tenant_quota": ("a=2GiB", "b=1MiB")}},
    ),
    ({"ssd": "/mnt/kv/:4GiB", "store_nodes": 2}, {f"store-{n}": {"ssd": f"/mnt/kv/store-{n}:4GiB"} for n in range(2)}),
    (
        {"decode_workers": 2, "conditional_disaggregation": "on", "tbt_slo": 0.3, "store_nodes": 2},
        {f"decode-{n}": {"tbt_slo": 0.3, "home_store": f"store-{n}"} for n in range(2)},
    ),
    (
        {"decode_workers": 2, "role_switching": "on", "store_nodes": 2},
        {
            "worker-0": {"role": "prefill", "home_store": "store-0"},
            "worker-1": {"role": "decode", "home_store": "store-1"},
            "worker-2": {"role": "decode", "home_store": "store-0"},
        },
    ),
    # No stage of a pipeline group has complete blocks to put into a store.
    ({"pipeline_parallel_size": 2}, {"prefill-0": {"pipeline_parallel_size": 2, "home_store": None}}),
    (
        {"tensor_parallel_size": 2, "role_switching": "on"},
        {"worker-0": {"tensor_parallel_size": 2, "shared_cores": None}},
    ),
    (
        {"kv_memory_budget": 800, "prefill_workers": 2, "decode_workers": 2},
        {
            name: {"is_elastic": True, "kv_memory_budget": 800, "kv_memory_floor": 50, "kv_memory_ledger": "/shares"}
            for name in ("prefill-1", "decode-1")
        },
    ),
    (
        {"kv_memory_budget": 800, "kv_memory_ledger": "/ours", "kv_memory_floor": 7},
        {"decode-0": {"kv_memory_ledger": "/ours", "kv_memory_floor": 7}},
    ),
]


@pytest.mark.parametrize(("options", "expected"), ARRIVES)
def test_options_of_serve_reach_the_processes(options: dict[str, Any], expected: dict[str, dict[str, Any]]) -> None:
    specs = members(ledger="/shares", **options)
    for name, values in expected.items():
        config = parsed(specs[name])
        assert {each: getattr(config, each) for each in values} == values


def test_every_process_accepts_its_flags_and_gets_the_shared_options() -> None:
    options: dict[str, Any] = {"block_size": 64, "transports": ("tcp",), "log_format": "json"}
    options |= {"port": 1234}
    for spec in [conductor_spec(ServeConfig(**options)), *members(**options).values()]:
        config = parsed(spec)
        assert (config.instance_id, config.log_format) == (spec.instance_id, "json")
        assert config.port == (1234 if spec.kind is ProcessKind.GATEWAY else 0)
        if spec.kind in (ProcessKind.PREFILL, ProcessKind.DECODE):
            assert (config.block_size, config.transports) == (64, ("tcp",))


def test_every_option_of_serve_belongs_to_a_process_or_to_the_launcher() -> None:
    launchers = {"conductors", "active_conductors", "prefill_workers", "decode_workers", "store_nodes", "gateways"}
    launchers |= {"prefill_tensor_parallel_size", "decode_tensor_parallel_size"}
    launchers |= {"log_dir", "worker_nice", "engine", "vllm_python", "lend_cores"}
    known = {option.name for config, _ in SERVERS.values() for option in options_of(named(config))}
    assert {option.name for option in options_of(ServeConfig)} <= known | launchers


def test_defaults_are_one_process_of_each_kind_with_low_priority_for_workers() -> None:
    nice = {name: spec.nice for name, spec in members().items()}
    assert nice == {"store-0": 0, "prefill-0": WORKER_NICE, "decode-0": WORKER_NICE, "gateway-0": 0}
    assert members(worker_nice=3)["decode-0"].nice == 3
    graces = {s.instance_id: s.stop_grace_s for s in members(ssd="d:1GiB").values()}
    assert graces.pop("store-0") == STOP_GRACE_S + ServeConfig().ssd_flush_s
    assert set(graces.values()) == {members()["store-0"].stop_grace_s} == {STOP_GRACE_S}
    assert STOP_GRACE_S < 5  # serve promises an end within 5 s; all processes end concurrently


def test_serve_and_conductor_have_the_same_default_policy_and_simulations_the_published_one() -> None:
    assert ServeConfig().placement_policy == ConductorConfig().placement_policy == "moonserve"
    assert SimulateConfig(trace="t").policy == (PUBLISHED_POLICY,) == ("global-cache-aware",)


def test_options_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('ssd = "/from/file:1GiB"\nssd_flush_s = 3.0\ntenant_quota = ["a=1GiB"]\n')
    environ = {"MOONSERVE_SSD": "/from/environment:2GiB", "MOONSERVE_SSD_WRITE_THROUGH": "1"}
    argv = ["--config", str(file), "--ssd-flush-s", "5"]
    config = load_config(ServeConfig, argv, prog="serve", environ=environ)
    assert (config.ssd, config.tenant_quota) == ("/from/environment:2GiB", ("a=1GiB",))
    assert (config.ssd_write_through, config.ssd_flush_s) == (True, 5.0)


def test_api_keys_are_passed_in_the_environment() -> None:
    spec = members(api_key=("k1", "k2"))["gateway-0"]
    assert not any("k1" in flag for flag in spec.flags)
    assert spec.environment == {"MOONSERVE_API_KEY": "k1,k2"}


def test_workers_get_gpus_in_turn_and_share_their_memory() -> None:
    """With three workers on two GPUs, each process sees only its own GPU, and two workers share one's memory."""
    specs = members(("0", "3"), decode_workers=2, gpu_memory_utilization=0.8)
    seen = {
        name: (spec.environment["CUDA_VISIBLE_DEVICES"], parsed(spec).gpu_memory_utilization)
        for name, spec in specs.items()
        if spec.kind in (ProcessKind.PREFILL, ProcessKind.DECODE)
    }
    assert seen == {"prefill-0": ("0", 0.4), "decode-0": ("3", 0.8), "decode-1": ("0", 0.4)}
    for on_processors in (specs["store-0"], *members(("0",), device="cpu").values()):
        assert "CUDA_VISIBLE_DEVICES" not in on_processors.environment


def test_each_role_has_its_own_number_of_ranks() -> None:
    """Each role has its own number of ranks; each rank has at least one thread, even with fewer cores."""
    specs = members(tensor_parallel_size=2, decode_tensor_parallel_size=64)
    prefill, decode = parsed(specs["prefill-0"]), parsed(specs["decode-0"])
    assert (prefill.tensor_parallel_size, decode.tensor_parallel_size) == (2, 64)
    assert prefill.num_threads >= 2
    assert decode.threads_per_rank >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_workers": 0}, "--"),
        ({"store_nodes": -1}, "--"),
        ({"port": 70000}, "--"),
        ({"block_size": 0}, "--"),
        ({"dram": 1}, "--"),
        ({"ssd": "/mnt/kv"}, "--"),
        ({"ssd": "/mnt/kv:much"}, "--"),
        ({"ssd": "/mnt/kv:1GiB", "store_nodes": 0}, "--"),
        ({"ssd_flush_s": -1.0}, "--"),
        ({"tenant_quota": ("alice",)}, "--"),
        ({"gpu_memory_utilization": 1.5}, "--"),
        ({"async_scheduling": True, "elastic_kv_memory": True}, "--"),
        ({"async_scheduling": True, "conditional_disaggregation": "on"}, "--"),
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"decode_tensor_parallel_size": 4, "num_threads": 2}, "below the 4 ranks"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"prefill_tensor_parallel_size": 2, "role_switching": "on"}, "--role-switching"),
        ({"pipeline_parallel_size": 2, "role_switching": "on"}, "--role-switching"),
        ({"conditional_disaggregation": "on", "role_switching": "on"}, "--role-switching"),
        ({"conductors": 2}, "--registry"),
        ({"worker_nice": 20}, "--worker-nice"),
        ({"max_num_seqs": 600}, "--max-num-batched-tokens"),
        ({"elastic_kv_memory": True, "transports": ("rdma", "tcp")}, "elastic"),
        ({"elastic_kv_memory": True, "pipeline_parallel_size": 2}, "elastic"),
        ({"kv_memory_budget": 100, "kv_memory_floor": 51}, "kv-memory"),
        ({"kv_memory_ledger": "/shares"}, "kv-memory"),
    ],
)
def test_impossible_clusters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeConfig(**options)
