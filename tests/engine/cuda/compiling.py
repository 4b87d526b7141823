"""Compiles every kernel that the launchers launch for a given compute capability. Needs no such GPU.

Prints one JSON line per kernel: `python -m tests.engine.cuda.compiling 90`. Runs in a process of its own, since Triton
decides at import whether it interprets.
"""

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moonserve.engine.cuda.attention_kernels import ChunkBatch, DecodeBatch, decode_attention, prefill_attention
from moonserve.engine.cuda.copy_kernel import copy_blocks
from moonserve.engine.cuda.layer_kernels import Positions, add_norm, rotate_and_store, swiglu

ATTENTION = ((torch.bfloat16, 80, 4096), (torch.bfloat16, 256, None), (torch.float32, 256, None))
"""(dtype, head_dim, window)"""


def compile_all(capability: int) -> Iterator[dict[str, Any]]:
    """Compiles all kernels. Yields a description of each."""
    compiled: list[Any] = []
    run: Callable[..., Any] = JITFunction.run

    def only_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["warmup"] = True
        compiled.append((self.fn.__name__, run(self, *args, **kwargs)))

    JITFunction.run = only_compile
    absent = {"target": GPUTarget("cuda", capability, 32), "device": capability, "stream": 0}
    answers = {f"get_current_{name}": lambda *_, value=value: value for name, value in absent.items()}
    driver.set_active(SimpleNamespace(**answers))  # a driver without a GPU
    for dtype, head_dim, window in ATTENTION:
        launch_attention(dtype, head_dim, window)
        yield from described(compiled, str(dtype), head_dim)
    for dtype in (torch.bfloat16, torch.float32):
        launch_others(dtype)
        yield from described(compiled, str(dtype), 128)


def described(compiled: list[Any], dtype: str, head_dim: int) -> Iterator[dict[str, Any]]:
    for name, kernel in compiled:
        ptx = kernel.asm["ptx"]
        yield {
            "kernel": name,
            "dtype": dtype,
            "head_dim": head_dim,
            "shared_bytes": kernel.metadata.shared,
            "tensor_cores": "mma.sync" in ptx or "wgmma" in ptx,
        }
    compiled.clear()


def launch_attention(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    queries = torch.zeros(4, 32, head_dim, dtype=dtype)
    pool = torch.zeros(2, 32, 8, head_dim, dtype=dtype)
    tables = torch.zeros(4, 16, dtype=torch.int32)
    output = torch.zeros(4, 32 * head_dim, dtype=dtype)
    singles = DecodeBatch(tables, torch.zeros(4, dtype=torch.int32), 32)
    decode_attention(queries, pool, pool, singles, window, output)
    chunks = ChunkBatch(tables, torch.zeros(1, 4, dtype=torch.int32))
    prefill_attention(queries, pool, pool, chunks, window, output)


def launch_others(dtype: torch.dtype) -> None:
    hidden, weight = torch.zeros(4, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    add_norm(hidden, None, weight, 1e-5)
    add_norm(hidden, hidden, weight, 1e-5)
    swiglu(torch.zeros(4, 2 * 14336, dtype=dtype))
    heads, pool = torch.zeros(4, 48, 128, dtype=dtype), torch.zeros(2, 32, 8, 128, dtype=dtype)
    copy_blocks((pool, pool), (pool, pool), torch.zeros(1, dtype=torch.int64))
    angles, slots = torch.zeros(4, 1, 128, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    positions = Positions(angles, angles, slots)
    for qk_norm in (None, torch.zeros(40, 128, dtype=dtype)):
        rotate_and_store(heads, 32, qk_norm, 1e-5, positions, pool, pool)


if __name__ == "__main__":
    for row in compile_all(int(sys.argv[1])):
        sys.stdout.write(json.dumps(row) + "\n")
