"""The attention benchmark: what its floors count, and that it runs from end to end."""

from __future__ import annotations

import pytest

from benchmarks.engine import attention
from benchmarks.engine.attention import SMALL, Work, decode, prompts, report, run


def test_the_floor_counts_each_seen_token_once_and_each_visible_pair() -> None:
    step = decode(2, 10)
    assert step.kv_elements == 2 * 10 * (2 * 4 * 64)
    assert step.flops == 2 * 10 * (4 * 12 * 64)
    chunk = prompts("chunk", (3, 5))
    assert chunk.kv_elements == 5 * (2 * 4 * 64)
    assert chunk.flops == (4 + 5) * (4 * 12 * 64)


@pytest.mark.parametrize("work", [decode(2, 40), prompts("two", (0, 9), (20, 40))])
def test_it_measures_native_beside_torch(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a small pool, and at an assumed bandwidth: measuring it takes half a gigabyte."""
    monkeypatch.setattr(attention, "_POOL_BYTES", 1 << 20)
    monkeypatch.setattr(attention, "read_bytes_per_s", lambda: 1e10)
    result = run([work], ["bfloat16"], rounds=1, threads=1)
    [row] = result["rows"]
    assert row["work"] == work.label
    assert work.geometry == SMALL
    assert min(row["native_ms"], row["torch_ms"], row["floor_ms"]) > 0
    assert f"| {work.label} | bfloat16 |" in report(result)
