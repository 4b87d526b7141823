"""A contestant that lies, dies or is missing is a row of the table, never the end of the run."""

import sys
from pathlib import Path

import pytest

from benchmarks.transfer import pair, rounds
from benchmarks.transfer.contestant import Contestant
from benchmarks.transfer.pair import Placement
from benchmarks.transfer.rounds import Result
from benchmarks.transfer.workload import SIZES, throughput

LOAD = throughput("read", *SIZES["1 MiB"])


def result_of(module: str, log_dir: Path, python: Path = Path(sys.executable)) -> Result:
    contestant = Contestant(name="x", group="peer", module=module, options={"huge": False})
    with rounds.seated([contestant], lambda _: python, log_dir, Placement.APART) as seats:
        rounds.verify(seats, [LOAD])
        rounds.measure(seats, [LOAD], rounds=1, min_s=0.001)
    return seats[0].result


def test_an_honest_contestant_has_samples(tmp_path: Path) -> None:
    result = result_of("benchmarks.transfer.limits.memory:Copy", tmp_path)
    assert result.absent is None
    (sample,) = result.samples[LOAD, ""]
    assert sample.nbytes == 128 << 20
    assert sample.cpu_s > 0
    assert not result.errors


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("Lying", "blocks arrived with other bytes"), ("Dying", "died: the disk is on fire")],
)
def test_a_contestant_that_fails_says_why_and_has_no_samples(
    kind: str, reason: str, tmp_path: Path
) -> None:
    result = result_of(f"tests.benchmarks.contestants:{kind}", tmp_path)
    assert reason in result.errors[LOAD]
    assert not result.samples


def test_a_contestant_that_hangs_is_killed_when_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "ANSWER_S", 2.0)
    result = result_of("tests.benchmarks.contestants:Hanging", tmp_path)
    assert result.errors[LOAD] == "no answer within 2 s"


def test_a_contestant_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    result = result_of("benchmarks.transfer.peers.nobody:", tmp_path)
    assert "No module named" in (result.absent or "")


def test_a_contestant_without_its_environment_is_not_installed(tmp_path: Path) -> None:
    result = result_of("benchmarks.transfer.limits.memory:Copy", tmp_path, tmp_path / "nothing")
    assert result.absent == "not installed"
