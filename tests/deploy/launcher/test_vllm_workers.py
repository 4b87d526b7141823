"""`moonserve serve --engine vllm` plans its workers: interpreter, options, GPUs and cores."""

import sys
from pathlib import Path

import pytest

from moonserve.deploy.launcher.config import ServeConfig
from moonserve.deploy.launcher.process_specs import ProcessKind, ProcessSpec, member_specs
from moonserve.deploy.launcher.vllm_workers import vllm_python
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import load_config
from moonserve.vllm.serving.config import VllmConfig


def _serve(*flags: str) -> ServeConfig:
    return load_config(ServeConfig, ["--engine", "vllm", *flags], prog="moonserve serve", environ={})


def _workers(config: ServeConfig, **where: object) -> list[ProcessSpec]:
    specs = member_specs(config, "/model", "c:1", **where)  # type: ignore[arg-type]
    return [spec for spec in specs if spec.kind in (ProcessKind.PREFILL, ProcessKind.DECODE)]


def test_options_of_vllm_reach_its_workers_in_order() -> None:
    config = _serve("--vllm.max-num-seqs", "8", "--vllm.enforce-eager", "--vllm.quantization=fp8")
    [prefill, decode] = _workers(config)
    assert prefill.argv == ("-m", "moonserve", "worker", "--engine", "vllm", "--role", "prefill")
    parsed = load_config(VllmConfig, decode.flags, prog="worker", environ={})
    assert parsed.vllm[-3:] == ("max-num-seqs=8", "enforce-eager", "quantization=fp8")
    assert parsed.model == "/model"


def test_an_option_of_the_own_engine_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"--kernels, --max-num-seqs: .* --vllm\.NAME"):
        _serve("--max-num-seqs", "8", "--kernels", "torch")
    with pytest.raises(ConfigError, match="needs --engine vllm"):
        load_config(ServeConfig, ["--vllm.max-num-seqs", "8"], prog="serve", environ={})


def test_workers_get_gpus_in_turn_and_share_their_memory() -> None:
    config = _serve("--decode-workers", "2", "--vllm.tensor-parallel-size", "2")
    workers = _workers(config, gpus=("0", "1", "2", "3"))
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in workers] == ["0,1", "2,3", "0,1"]
    assert [("--vllm.gpu-memory-utilization=0.45" in spec.flags) for spec in workers] == [True, False, True]


def test_workers_get_their_share_of_the_cores() -> None:
    workers = _workers(_serve("--num-threads", "2"), cores=(0, 1, 4, 5))
    assert [spec.environment["OMP_NUM_THREADS"] for spec in workers] == ["2", "2"]
    ranked = _workers(_serve("--num-threads", "2", "--vllm.tensor-parallel-size=2"), cores=(0, 1, 4, 5))
    assert [spec.environment["VLLM_CPU_OMP_THREADS_BIND"] for spec in ranked] == ["0|1", "4|5"]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in _workers(_serve())[0].environment


def test_a_worker_in_another_environment_sees_no_packages_of_this_one() -> None:
    [prefill, _] = _workers(_serve("--vllm-python", "/other/bin/python"))
    assert prefill.python == "/other/bin/python"
    assert (Path(prefill.environment["PYTHONPATH"]) / "pyproject.toml").exists()
    [prefill, _] = _workers(_serve())
    assert prefill.python == sys.executable
    assert "PYTHONPATH" not in prefill.environment


def test_an_interpreter_without_vllm_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--vllm-python"):
        vllm_python(_serve("--vllm-python", str(tmp_path / "python")))
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match="needs a Python environment with vllm"):
        vllm_python(_serve("--vllm-python", str(bare)))


def test_store_nodes_join_the_registry_that_connectors_read() -> None:
    specs = member_specs(_serve(), "/model", "c:1", registry="127.0.0.1:9")
    [store] = [spec for spec in specs if spec.kind is ProcessKind.STORE]
    assert store.environment["MOONSERVE_JOIN"] == "127.0.0.1:9"
    assert "--conductor" not in store.flags
    workers = [spec for spec in specs if spec.kind is ProcessKind.DECODE]
    assert workers[0].environment["MOONSERVE_KV_JOIN"] == "127.0.0.1:9"


def test_gateways_wait_long_enough_for_a_restarted_engine() -> None:
    specs = member_specs(_serve(), "/model", "c:1")
    flags = specs[-1].flags
    assert float(flags[flags.index("--worker-patience-s") + 1]) >= 120
