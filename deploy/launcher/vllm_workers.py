"""What `moonserve serve --engine vllm` derives for its workers: interpreter, environment, engine options.

vLLM pins versions of packages that moonserve has, too, so its workers may run in another Python environment.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import moonserve
from moonserve.deploy.launcher.config import ServeConfig
from moonserve.protocol.errors import ConfigError

CPU_KV_BYTES = 1 << 30  # vLLM's default on CPUs is half of the machine's memory, for each worker
PATIENCE_S = 120.0
"""Time that requests wait for a worker that restarts. vLLM takes 10 s to start with a tiny model, or minutes."""
STOP_S = 8.0
"""Time that vLLM takes to end its processes, after the worker's requests have ended."""
_ROOT = Path(moonserve.__file__).parent.parent
_CHECK_TIMEOUT_S = 60.0
_CHECK = "import importlib.util as u, sys; print(*[n for n in ('vllm', 'moonserve') if u.find_spec(n) is None])"


def vllm_python(config: ServeConfig) -> str:
    """Returns the interpreter for vLLM workers. Raises ConfigError, with the remedy, unless it has vLLM."""
    python = config.vllm_python or sys.executable
    environment = {**os.environ, **interpreter_environment(python)}
    try:
        missing = subprocess.run(
            [python, "-c", _CHECK],
            capture_output=True,
            text=True,
            check=True,
            timeout=_CHECK_TIMEOUT_S,
            env=environment,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--vllm-python {python} cannot be run: {error}") from error
    if missing:
        raise ConfigError(
            f"--engine vllm needs a Python environment with {' and '.join(missing)}, which {python} is not: install it "
            "there, or name the interpreter of another environment with --vllm-python"
        )
    return python


def interpreter_environment(python: str) -> dict[str, str]:
    """Returns the environment with which an interpreter finds this moonserve, and no packages of this environment."""
    if python == sys.executable:
        return {}
    return {"PYTHONPATH": str(_ROOT) if (_ROOT / "pyproject.toml").exists() else ""}


def tensor_parallel_size(config: ServeConfig) -> int:
    """Returns vLLM's tensor-parallel size, which is how many GPUs a worker needs. Raises ConfigError."""
    given = vllm_option(config, "tensor-parallel-size", "tp") or "1"
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"--vllm.tensor-parallel-size {given} is not a number above 0")
    return int(given)


def vllm_option(config: ServeConfig, *names: str) -> str | None:
    """Returns the value of an option of vLLM's, given by any of its names."""
    for item in reversed(config.vllm):
        name, _, value = item.partition("=")
        if name.replace("_", "-") in names:
            return value
    return None


def device_environment(
    config: ServeConfig, index: int, gpus: Sequence[str], cores: Sequence[int]
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Returns the environment of the worker with this index, and engine options that it needs: its own GPUs in turn, or
    as many threads as its share of the cores; several ranks are bound to theirs. `cores`: of this machine; empty = the
    user has bound threads already."""
    size, num_workers = tensor_parallel_size(config), config.num_workers
    if gpus:
        groups = max(1, len(gpus) // size)
        first = index % groups * size
        num_sharing = len(range(index % groups, num_workers, groups))
        share = config.gpu_memory_utilization / num_sharing
        is_given = vllm_option(config, "gpu-memory-utilization") is not None
        options = () if is_given else (f"gpu-memory-utilization={share:.4g}",)
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + size])}, options
    is_given = vllm_option(config, "kv-cache-memory-bytes") is not None or config.kv_cache_memory is not None
    options = () if is_given else (f"kv-cache-memory-bytes={CPU_KV_BYTES}",)
    if not cores:
        return {}, options
    each = max(config.threads_per_worker, size)
    if size == 1:
        # vLLM then computes in the process of its engine core: one process less, and none that waits by spinning.
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(each),
        }
        return environment, options
    own = [str(cores[(index * each + offset) % len(cores)]) for offset in range(each)]
    ranks = [",".join(own[rank::size]) for rank in range(size)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(ranks)}, options
