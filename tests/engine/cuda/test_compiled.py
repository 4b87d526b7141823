"""Compiles the Triton kernels for absent GPUs. The compiler rejects code that the interpreter accepts."""

import json
from pathlib import Path

import pytest

from tests.processes import run_module
from tests.thoroughness import THOROUGH

pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")

from moonserve.engine.cuda.attention_kernels import LEAST_SHARED

CAPABILITIES = (80, 90) if THOROUGH else (80,)
"""Each takes half a minute of CPU time. `benchmarks/gpu_check.sh` also runs the kernels on 9.0."""


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for_every_gpu_since_ampere(capability: int, tmp_path: Path) -> None:
    """Attention uses tensor cores for every dtype but float32, which is computed exactly."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_module("tests.engine.cuda.compiling", str(capability), **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == {
        "_attend_part",
        "_join_parts",
        "_attend_tile",
        "_add_norm",
        "_copy_blocks",
        "_swiglu",
        "_rotate_and_store",
    }
    for row in rows:
        assert row["shared_bytes"] <= LEAST_SHARED, row
        if row["kernel"] in ("_attend_part", "_attend_tile"):
            assert row["tensor_cores"] == (row["dtype"] != "torch.float32"), row
