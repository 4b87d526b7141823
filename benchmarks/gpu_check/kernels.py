"""Compares each kernel with its definition in float64 on the CPU, over shapes chosen to break it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.gpu_check.attention_cases import TOLERANCES, AttentionCase, relative_error
from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.report import Row, at_most, guarded
from moonserve.engine.cuda.attention import TritonAttention

FusedError = Callable[[torch.dtype, torch.device], float]
"""Function that returns the relative error of one kernel."""

_EPSILON = 1e-5

ATTENTION_CASES = (
    AttentionCase(spans=((0, 1), (15, 16), (16, 17), (299, 300), (10, 35), (0, 20))),
    AttentionCase(spans=((70, 71), (33, 34), (50, 80)), window=20, shared_blocks=2),
    AttentionCase(spans=((40, 41), (5, 30)), heads=28, kv_heads=4, head_dim=128, block_size=32),
    AttentionCase(spans=((40, 41), (5, 30)), heads=7, kv_heads=1, head_dim=80),
    AttentionCase(spans=((40, 41), (5, 30)), heads=8, kv_heads=8, head_dim=256),
)
LARGE_CASES = (
    AttentionCase(
        spans=((8999, 9000), (255, 256), (4000, 4200)),
        heads=32,
        kv_heads=8,
        head_dim=128,
        block_size=32,
    ),
    AttentionCase(spans=((0, 1500),), heads=32, kv_heads=8, head_dim=64, block_size=512),
    AttentionCase(spans=((8000, 8001), (3000, 3300)), heads=32, kv_heads=8, head_dim=128, window=1024),
)


def attention(bench: CheckContext) -> Iterator[Row]:
    """Checks attention with decode and prefill in one step, by dtype."""
    cases = ATTENTION_CASES if bench.rehearses else ATTENTION_CASES + LARGE_CASES
    for dtype, bound in TOLERANCES.items():
        own = [case.with_dtype(dtype) for case in cases]
        yield guarded(
            f"attention kernels, {_short(dtype)}",
            partial(_attention_row, bench=bench, cases=own, bound=bound),
        )


def _attention_row(name: str, bench: CheckContext, cases: Sequence[AttentionCase], bound: float) -> Row:
    return _row(name, [_attention_error(case, bench) for case in cases], bound)


def _attention_error(case: AttentionCase, bench: CheckContext) -> float:
    inputs = case.build(bench.device)
    backend = TritonAttention(case.geometry, inputs.pool)
    plan = backend.plan(inputs.spans, case.window)
    unused = inputs.queries.new_empty(0)
    found = backend.attend(0, plan, inputs.queries, unused, unused)
    return relative_error(found, inputs.expected())


def fused(bench: CheckContext) -> Iterator[Row]:
    """Checks the kernels of norm, SwiGLU, and rotation with KV write, by dtype."""
    checks: dict[str, FusedError] = {
        "norm": _norm_error,
        "SwiGLU": _swiglu_error,
        "rotation and KV write": _rotation_error,
    }
    for what, check in checks.items():
        for dtype, bound in TOLERANCES.items():
            yield guarded(
                f"{what} kernel, {_short(dtype)}",
                partial(_fused_row, check=check, dtype=dtype, device=bench.device, bound=bound),
            )


def _fused_row(name: str, check: FusedError, dtype: torch.dtype, device: torch.device, bound: float) -> Row:
    return _row(name, [check(dtype, device)], bound)


def _norm_error(dtype: torch.dtype, device: torch.device) -> float:
    from moonserve.engine.cuda.layer_kernels import add_norm

    hidden, added, weight = (_random(dtype, *shape) for shape in ((37, 4096), (37, 4096), (4096,)))
    total = (hidden + added).double()
    scale = (total.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()
    found = add_norm(hidden.to(device), added.to(device), weight.to(device), _EPSILON)
    return relative_error(found, total * scale * weight.double())


def _swiglu_error(dtype: torch.dtype, device: torch.device) -> float:
    from moonserve.engine.cuda.layer_kernels import swiglu

    gate_up = _random(dtype, 37, 2 * 1025)
    gate, up = gate_up.double().chunk(2, -1)
    return relative_error(swiglu(gate_up.to(device)), gate * gate.sigmoid() * up)


def _rotation_error(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the largest error of rotated queries and keys, stored keys and stored values."""
    from moonserve.engine.cuda.layer_kernels import Positions, rotate_and_store

    heads, kv_heads, head_dim, block_size = 28, 4, 128, 16
    rotated = heads + kv_heads
    projected = _random(dtype, 21, rotated + kv_heads, head_dim)
    weight = _random(dtype, rotated, head_dim)
    cos, sin = (_random(dtype, 21, 1, head_dim) for _ in range(2))
    slots = torch.randperm(4 * block_size)[:21]
    exact = projected[:, :rotated].double()
    scale = (exact.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()
    exact = exact * scale * weight.double()
    exact = exact * cos.double() + exact.roll(head_dim // 2, -1) * sin.double()
    own = projected.to(device)
    keys, values = (torch.zeros(4, block_size, kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv")
    places = Positions(*(one.to(device) for one in (cos, sin, slots)))
    rotate_and_store(own, heads, weight.to(device), _EPSILON, places, keys, values)
    stored_keys, stored_values = (one.cpu().flatten(0, 1)[slots] for one in (keys, values))
    return max(
        relative_error(own[:, :rotated], exact),
        relative_error(stored_keys, exact[:, heads:]),
        relative_error(stored_values, projected[:, rotated:]),
    )


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _row(name: str, errors: list[float], bound: float) -> Row:
    # max() can lose a NaN that follows a number.
    worst = float("nan") if any(error != error for error in errors) else max(errors)
    found = f"error {worst:.1e} in {len(errors)} case{'s' * (len(errors) > 1)}"
    return at_most(name, worst, bound, found, f"≤ {bound:.1e} of float64")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
