"""Benchmarks of the engine, tiny: each runs to its table, and what it compares agrees."""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks.engine import attention, block_pool, prefix, store_writes
from benchmarks.engine.contest import Side, measure_shape
from benchmarks.engine.contestants import NATIVE, TORCH, TRANSFORMERS, Wish
from benchmarks.engine.kv_error import ANSWER, PROMPT, TEXTS, read_texts
from benchmarks.engine.kv_scales import RememberingPool
from benchmarks.engine.lookahead.__main__ import POLICIES, Load, dominates, replay, verdict
from benchmarks.engine.lookahead.figures import as_table
from benchmarks.engine.lookahead.load import SYNTHETIC, synthetic
from benchmarks.engine.overlap_record import Record
from benchmarks.engine.overlap_timeline import picture
from benchmarks.engine.shapes import DEMO_FOLDER, Shape, prompt_tokens
from engine.kv_pool import KvPool
from protocol.layout import QUANTISED_DTYPES, KvLayout
from traces.format import TOKENS_PER_HASH, TraceRecord


def test_attention_is_measured_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a small pool; measuring memory and matrix products takes half a gigabyte and seconds."""
    monkeypatch.setattr(attention, "_POOL_BYTES", 1 << 20)
    monkeypatch.setattr(attention, "_GEMM_ROWS", 32)
    monkeypatch.setattr(attention, "read_bytes_per_s", lambda: 1e10)
    works = [attention.decode(2, 40), attention.prompts("two", (0, 9), (20, 40))]
    result = attention.run(works, ["bfloat16"], rounds=1, threads=1)
    for row in result["rows"]:
        assert min(row["native_ms"], row["torch_ms"], row["floor_ms"]) > 0
        assert f"| {row['work']} | bfloat16 |" in attention.report(result)


def test_the_block_pool_is_measured_in_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "CALLS", 600)
    row = block_pool.measure(250, rounds=2)
    assert all(row[column] >= 0 for columns in block_pool.TABLES.values() for column in columns)
    assert len(block_pool.bars(row)) == 5


@pytest.mark.parametrize("kept", QUANTISED_DTYPES)
def test_the_pool_of_the_error_table_remembers_what_a_workers_pool_does(kept: str) -> None:
    shape = {"num_layers": 2, "block_size": 4, "num_kv_heads": 3, "head_dim": 8}
    real = KvPool(KvLayout(**shape, dtype=kept), 2, dtype="float32")  # type: ignore[arg-type]
    plain = KvLayout(**shape, dtype="float32")  # type: ignore[arg-type]
    simulated = RememberingPool(plain, 2, kept, "token, head")
    keys, values = torch.randn(2, 3, 3, 8, generator=torch.Generator().manual_seed(0))
    for pool in (real, simulated):
        pool.write(1, torch.tensor([4, 7, 5]), keys, values)
    block = torch.tensor([1])
    for found, expected in zip(simulated.gather(1, block), real.gather(1, block), strict=True):
        assert torch.equal(found, expected)
    assert read_texts().shape == (len(TEXTS), PROMPT + ANSWER)


def test_allocators_are_replayed_and_lookahead_dominates() -> None:
    """Virtual time: fewer preemptions than on demand, more throughput than for the worst case."""
    load = Load("chat", synthetic(SYNTHETIC["chat"], 300, 1e9, seed=7), 100_000)
    rows = {name: replay(load, make()) for name, make in POLICIES.items()}
    assert dominates(rows), verdict(rows)
    assert len(as_table(list(rows.items())).splitlines()) == 2 + len(POLICIES)


def test_the_picture_of_overlap_has_a_bar_for_each_turn_and_layer(tmp_path: Path) -> None:
    record = Record(
        leases=[(0.0, 0.1)],
        turns=[(0.1, 0.4), (0.4, 0.9)],
        checks=[(0.9, 1.0)],
        steps=[(0.4, 2.0)],
        pauses=[(0.5, 0.8), (1.5, 1.6)],
    )
    assert record.hidden_share == pytest.approx(0.3)  # waits for layers hide nothing
    picture(path := tmp_path / "timeline.svg", "one & two", [("layered", record)])
    bars = [e.get("fill") for e in ET.fromstring(path.read_text()).iter() if e.tag[-4:] == "rect"]
    assert (bars.count("#3a86ff"), bars.count("#2a9d8f")) == (3, 4)  # one each in the legend


def test_both_prefix_indices_keep_the_same_blocks_through_a_round() -> None:
    left = []
    for make_index in prefix.INDICES.values():
        load = prefix.Load(20_000, make_index)
        assert all(getattr(load, figure)() >= 0 for figure in prefix.FIGURES)
        load.pool.validate()
        left.append(set(load.pool.keys()))
    assert left[0] == left[1]


def test_a_store_that_gets_all_serves_what_devices_lost_and_one_that_gets_nothing_none() -> None:
    """Two prompts of ten blocks in turns, of which a device holds one."""
    records = [
        TraceRecord(
            arrived_s=float(n),
            input_length=TOKENS_PER_HASH * 10,
            output_length=1,
            hash_ids=tuple(range(100 * (n % 2), 100 * (n % 2) + 10)),
        )
        for n in range(40)
    ]
    rules = {rule.name: rule for rule in store_writes.RULES}
    device = 10 * TOKENS_PER_HASH / 1e6
    nothing = store_writes.simulate(records, rules["none"], device, 1.0)
    everything = store_writes.simulate(records, rules["all"], device, 1.0)
    assert (nothing["written"], nothing["hit_ratio"]) == (0, nothing["of_device"])
    assert (everything["written"], everything["hit_ratio"]) == (20 / 400, 380 / 400)


def test_contestants_take_turns_in_processes_and_give_the_same_tokens(tmp_path: Path) -> None:
    names = (NATIVE, TORCH, TRANSFORMERS)
    wish = {"folder": str(DEMO_FOLDER), "scratch": str(tmp_path), "dtype": "float32"}
    with ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))[:1]
        sides = {name: Side(Wish(name=name, cores=cores, **wish)) for name in names}
        for side in sides.values():
            stack.callback(side.close)
        for side in sides.values():
            side.wait_until_ready()
        tokens = [side.greedy(prompt_tokens(0, 40, 4096), 6) for side in sides.values()]
        assert len(tokens[0]) == 6
        assert tokens.count(tokens[0]) == len(tokens)
        for shape in (Shape(batch=2, context=40), Shape(prompt=70)):
            for figures in measure_shape(sides, shape, rounds=1, retakes=0).values():
                assert all(math.isfinite(value) and value >= 0 for value in figures.values())
