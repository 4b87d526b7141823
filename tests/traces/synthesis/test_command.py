"""`moonserve traces synthesize` writes what was asked for, or says in one line what to mend."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.traces.made import write_small
from tests.traces.synthesis.test_workload import check_laws
from traces.cli import main
from traces.format import TraceRecord, read_checked
from traces.synthesis.workload import Constant, Empirical, LogNormal, parse_draws


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "small.jsonl")


def test_options_describe_the_trace_and_the_same_ones_give_the_same_bytes_in_every_version(
    small: Path, tmp_path: Path
) -> None:
    options = (
        "--seed 7 --input-tokens lognormal:3000:1 --turn-tokens lognormal:700:1 --system-prompts 3 "
        "--system-tokens 600 --output-tokens lognormal:300:0.8 --session-share 0.4 --turns 3 "
        "--think-s lognormal:60:0.8 --rate 5 --arrivals gamma --burstiness 2 --requests 1500 "
        "--max-input-tokens 32000"
    )
    out = tmp_path / "again.jsonl"
    assert main(["synthesize", "--out", str(out), *options.split()]) == 0
    assert out.read_bytes() == small.read_bytes()
    assert hashlib.sha256(out.read_bytes()).hexdigest().startswith("b00db49681b5e536")
    check_laws(read_checked(out))


def test_a_likeness_is_as_long_as_its_model_unless_told_otherwise_and_the_same_for_a_seed(
    small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.jsonl"

    def made(*options: str) -> list[TraceRecord]:
        assert main(["synthesize", "--out", str(out), "--like", str(small), *options]) == 0
        return read_checked(out)

    likeness = made()
    assert len(likeness) == 1500
    assert made("--seed", "0") == likeness != made("--seed", "1")
    assert len(made("--requests", "70", "--rate", "50")) == 70
    assert 25 < made("--duration", "30")[-1].arrived_s < 30


def test_a_preset_takes_changes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "t.jsonl"
    options = ["--preset", "conversation", "--requests", "50", "--output-tokens", "9"]
    assert main(["synthesize", "--out", str(out), *options]) == 0
    records = read_checked(out)
    assert {record.output_length for record in records} == {9}
    assert {record.hash_ids[0] for record in records} == {0}


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    assert main(["synthesize", "--out", str(pipe), "--requests", "5"]) == 0
    reader.join()
    assert received[0].count("\n") == 5
    assert pipe.is_fifo()


def test_a_broken_model_is_named_by_line(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(small.read_text().replace('"input_length": ', '"input_length": 9', 1))
    assert main(["synthesize", "--out", str(tmp_path / "t"), "--like", str(small)]) == 2
    assert "small.jsonl:1: input_length" in capsys.readouterr().err


def test_distributions_are_written_as_documented(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("3\n4.5\n")
    assert parse_draws("300", "--x") == Constant(300)
    assert parse_draws("lognormal:300:0.5", "--x") == LogNormal(300, 0.5)
    assert parse_draws(f"empirical:{tmp_path / 'lengths'}", "--x") == Empirical((3, 4.5))
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty"):
        parse_draws(f"empirical:{tmp_path / 'empty'}", "--x")
