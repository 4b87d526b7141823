"""Locates the peers' installation (`make .venv-peers/.installed`) and sets their processes' environment variables."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.engine.contestants import LLAMA_CPP, VLLM

_ROOT = Path(__file__).parent.parent.parent.parent
_PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
_NEEDED = {VLLM: ("vllm",), LLAMA_CPP: ("llama_cpp", "gguf", "safetensors")}
# vLLM recommends on x86 (in a warning at start): Intel's OpenMP, which it brings along, and tcmalloc, if installed
# (Debian: libtcmalloc-minimal4).
_OPENMP = _PYTHON.parent.parent / "lib" / "libiomp5.so"
_TCMALLOC = "libtcmalloc_minimal.so.4"


def interpreter(contestant: str) -> Path:
    return _PYTHON if contestant in _NEEDED else Path(sys.executable)


def is_installed(contestant: str) -> bool:
    """True if the contestant's modules are installed; does not import them."""
    if contestant not in _NEEDED:
        return True
    if not _PYTHON.exists():
        return False
    looks = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    found = subprocess.run([_PYTHON, "-c", looks, *_NEEDED[contestant]], check=False, cwd="/")
    return found.returncode == 0


def environment(contestant: str, cores: Sequence[int]) -> Mapping[str, str]:
    if contestant not in _NEEDED:
        return os.environ
    own = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": str(len(cores))}
    if contestant == VLLM:
        own |= {
            "LD_PRELOAD": f"{_OPENMP}:{_TCMALLOC}" if _has(_TCMALLOC) else str(_OPENMP),
            "KMP_BLOCKTIME": "5",  # ms; vLLM sets it for its workers
            "KMP_TPAUSE": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, no messages
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "3",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
    return {**os.environ, **own}


def _has(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
