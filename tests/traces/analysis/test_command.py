"""`moonserve traces analyze` prints tables, writes JSON, and names the line at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traces.cli import main

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_tables_and_json_tell_the_same_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", GOOD, GOOD | {"timestamp": 65_005})
    figures = tmp_path / "new" / "f.json"
    assert main(["analyze", str(trace), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "cache ratio        42.7%" in printed
    statistics = json.loads(figures.read_text())
    assert statistics["trace"] == "t.jsonl"
    assert statistics["cache_ratio"] == pytest.approx(512 / 1200)
    assert statistics["lru"]["curve"][-1] == {
        "capacity_tokens": None, "hit_ratio": pytest.approx(512 / 1200),
    }  # fmt: skip


def test_capacities_can_be_chosen(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", GOOD, GOOD)
    figures = tmp_path / "f.json"
    assert main(["analyze", str(trace), "--capacities", "2048,512", "--json", str(figures)]) == 0
    curve = json.loads(figures.read_text())["lru"]["curve"]
    assert [point["capacity_tokens"] for point in curve] == [512, 2048, None]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (GOOD | {"timestamp": 4}, "t.jsonl:2: timestamp is earlier"),
        (GOOD | {"timestamp": float("nan")}, "t.jsonl:2: timestamp is no number"),
        (GOOD | {"input_length": 1025}, "t.jsonl:2: input_length 1025 needs 3 hash ids"),
        (GOOD | {"hash_ids": None}, "t.jsonl:2 is not a trace record"),
        (GOOD | {"output_length": -1}, "t.jsonl:2 has an impossible length"),
    ],
)
def test_the_line_at_fault_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: object, complaint: str
) -> None:
    trace = write(tmp_path / "t.jsonl", GOOD, entry)
    assert main(["analyze", str(trace)]) == 2
    assert complaint in capsys.readouterr().err
