"""Tests that synthetic workloads, from code and from the command, obey the trace format and their description."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.__main__ import traces as main
from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord, read_checked
from moonserve.traces.workload import generator
from moonserve.traces.workload.statistics import analyze, describe_arrivals
from tests.traces.made import write_small


def check_laws(records: Sequence[TraceRecord]) -> None:
    """Asserts sorted arrivals, as many ids as a length needs, one parent and fill per id, and ids in order of use."""
    parents: dict[int, int | None] = {}
    fills: dict[int, int] = {}
    earlier_s = 0.0
    for record in records:
        assert record.arrived_s >= earlier_s
        earlier_s = record.arrived_s
        assert record.output_length >= 1
        assert len(record.hash_ids) == -(-record.input_length // TOKENS_PER_HASH)
        parent: int | None = None
        left = record.input_length
        for hash_id in record.hash_ids:
            assert hash_id <= len(parents)  # a new id is the next integer
            assert parents.setdefault(hash_id, parent) == parent
            fill = min(left, TOKENS_PER_HASH)
            assert fills.setdefault(hash_id, fill) == fill
            parent, left = hash_id, left - fill


def times(spec: generator.ArrivalSpec, count: int = 20_000) -> list[float]:
    return list(islice(generator.arrival_times(spec, Random(3)), count))


@pytest.mark.parametrize(("process", "gap_cv"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0)])
def test_rate_and_burstiness_are_as_asked(process: str, gap_cv: float) -> None:
    spec = generator.ArrivalSpec(rate=5, process=process, burstiness=gap_cv or 1.0)
    arrivals = describe_arrivals(times(spec), window_s=60)
    assert arrivals["mean_rate"] == pytest.approx(5, rel=0.06)
    assert arrivals["gap_cv"] == pytest.approx(gap_cv, rel=0.08, abs=1e-6)


def test_a_day_has_its_quiet_and_its_busy_hours() -> None:
    """With amplitude 0.8, noon has nine times the arrivals of midnight, and the mean over a day is the rate."""
    spec = generator.ArrivalSpec(rate=2, process="constant", diurnal_amplitude=0.8, diurnal_period_s=10_000)
    counts = np.histogram(times(spec), bins=100, range=(0, 10_000))[0]
    assert counts.sum() == pytest.approx(20_000, abs=2)
    assert counts[0] == pytest.approx(2 * 100 * 0.2, rel=0.1)
    assert counts[50] == pytest.approx(2 * 100 * 1.8, rel=0.02)


def made(spec: generator.WorkloadSpec, count: int, seed: int = 0) -> list[TraceRecord]:
    spec.check()
    return list(islice(generator.requests_of(spec, Random(seed)), count))


def lengths() -> st.SearchStrategy[generator.Distribution]:
    return st.one_of(
        st.builds(generator.Constant, st.floats(0, 4000)),
        st.builds(generator.LogNormal, st.floats(0.5, 3000), st.floats(0, 2)),
    )


def specs() -> st.SearchStrategy[generator.WorkloadSpec]:
    arrivals = st.builds(
        generator.ArrivalSpec,
        rate=st.floats(0.01, 1000),
        process=st.sampled_from(["constant", "poisson", "gamma"]),
        burstiness=st.floats(0.3, 4),
        diurnal_amplitude=st.floats(0, 1),
        diurnal_period_s=st.floats(1, 1e5),
    )
    return st.builds(
        generator.WorkloadSpec,
        arrivals=arrivals,
        max_input_tokens=st.integers(1, 20_000),
        system_share=st.floats(0, 1),
        system_prompts=st.integers(1, 5),
        system_zipf=st.floats(0, 3),
        session_share=st.floats(0, 0.5),
        turns=st.floats(1, 5),
        document_share=st.floats(0, 0.5),
        questions=st.floats(1, 5),
        **{f"{name}_tokens": lengths() for name in ("input", "output", "system", "turn", "document", "question")},
        think_s=lengths(),
    )


@settings(deadline=None)
@given(specs(), st.integers(0, 3))
def test_any_description_gives_a_trace_that_obeys_the_format(spec: generator.WorkloadSpec, seed: int) -> None:
    records = made(spec, 150, seed)
    check_laws(records)
    assert all(record.input_length <= spec.max_input_tokens for record in records)
    assert records == made(spec, 150, seed)


EVERY_SECOND = generator.ArrivalSpec(rate=1, process="constant")


def test_turns_extend_the_last_prompt_and_its_answer() -> None:
    """A session starts with 1,000 tokens; each turn adds 100 tokens of the answer and 24 new ones."""
    spec = generator.WorkloadSpec(
        arrivals=EVERY_SECOND,
        input_tokens=generator.Constant(1000),
        output_tokens=generator.Constant(100),
        system_share=0,
        session_share=1,
        turns=1e9,
        turn_tokens=generator.Constant(24),
        think_s=generator.Constant(0),
    )
    found = [(record.input_length, record.hash_ids) for record in made(spec, 4)]
    assert found == [(1000, (0, 1)), (1124, (0, 2, 3)), (1248, (0, 2, 4)), (1372, (0, 2, 5))]


def test_questions_share_the_document_and_nothing_else() -> None:
    spec = generator.WorkloadSpec(
        arrivals=EVERY_SECOND,
        system_share=0,
        session_share=0,
        document_share=1,
        document_tokens=generator.Constant(1024),
        question_tokens=generator.Constant(600),
        questions=1e9,
        think_s=generator.Constant(0),
    )
    assert [record.hash_ids for record in made(spec, 3)] == [(0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 6, 7)]


def test_popular_system_prompts_follow_zipf() -> None:
    spec = generator.WorkloadSpec(
        session_share=0, system_prompts=3, system_zipf=1, system_tokens=generator.Constant(512)
    )
    counts = Counter(record.hash_ids[0] for record in made(spec, 6_000))
    ratios = [count / 6_000 for _, count in counts.most_common()]
    assert ratios == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)


def test_threads_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no thread returns before the trace ends, at most `MAX_WAITING` threads are kept."""
    monkeypatch.setattr("moonserve.traces.workload.threads.MAX_WAITING", 10)
    spec = generator.WorkloadSpec(session_share=1, turns=100, think_s=generator.Constant(1e9))
    threads = generator._UserThreads(spec, Random(0))
    for second in range(100):
        threads.request(float(second))
    waiting = threads._waiting
    assert len(waiting) == 10
    while thread := waiting.pop_due(math.inf):
        thread.validate()


# name → published number of requests, mean input, mean output and cache ratio
TABLE_2 = {
    "conversation": (12_031, 12_035, 343, 0.40),
    "tool-agent": (23_608, 8_596, 182, 0.59),
    "synthetic": (3_993, 15_325, 149, 0.66),
}


@pytest.mark.parametrize("name", generator.PRESETS)
def test_presets_have_the_published_figures(name: str) -> None:
    """Presets match table 2: requests exactly; for one seed, mean input within 8 %, output 4 %, cache ratio 0.04."""
    requests, mean_input, mean_output, cache_ratio = TABLE_2[name]
    spec = generator.PRESETS[name]
    statistics = analyze(made(spec, spec.num_requests))
    assert statistics["num_requests"] == requests
    assert statistics["input_length"]["mean"] == pytest.approx(mean_input, rel=0.08)
    assert statistics["output_length"]["mean"] == pytest.approx(mean_output, rel=0.04)
    assert statistics["cache_ratio"] == pytest.approx(cache_ratio, abs=0.04)
    assert statistics["arrivals"]["duration_s"] == pytest.approx(3600, rel=0.05)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "small.jsonl")


def test_options_describe_the_trace_and_give_the_same_bytes_in_every_version(small: Path, tmp_path: Path) -> None:
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


def test_a_likeness_has_the_length_of_its_model_by_default_and_depends_on_the_seed(small: Path, tmp_path: Path) -> None:
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
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(pipe.read_text)
        assert main(["synthesize", "--out", str(pipe), "--requests", "5"]) == 0
    assert received.result().count("\n") == 5
    assert pipe.is_fifo()


def test_a_broken_model_is_named_by_line(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(small.read_text().replace('"input_length": ', '"input_length": 9', 1))
    assert main(["synthesize", "--out", str(tmp_path / "t"), "--like", str(small)]) == 2
    assert "small.jsonl:1: input_length" in capsys.readouterr().err


def test_distributions_are_written_as_documented(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("3\n4.5\n")
    assert generator.parse_distribution("300", "--x") == generator.Constant(300)
    assert generator.parse_distribution("lognormal:300:0.5", "--x") == generator.LogNormal(300, 0.5)
    assert generator.parse_distribution(f"empirical:{tmp_path / 'lengths'}", "--x") == generator.Empirical((3, 4.5))
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty"):
        generator.parse_distribution(f"empirical:{tmp_path / 'empty'}", "--x")
