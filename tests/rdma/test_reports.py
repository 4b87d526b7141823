"""What the host makes of the guest's lines."""

import json
from pathlib import Path

from tests.rdma.reports import read


def lines(path: Path, *told: tuple[str, str]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"nodeid": nodeid, "outcome": outcome, "text": "", "duration_s": 0.1}) + "\n"
            for nodeid, outcome in told
        )
    )
    return path


def test_each_case_counts_once_with_its_last_outcome(tmp_path: Path) -> None:
    told = lines(
        tmp_path / "r", ("a.py::x", "started"), ("b.py::y", "started"), ("a.py::x", "passed")
    )
    cases = read(told)
    assert [case.outcome for case in cases["a.py"]] == ["passed"]
    assert [case.is_good for case in cases["b.py"]] == [False]


def test_a_failure_is_not_taken_back_by_what_follows(tmp_path: Path) -> None:
    assert not read(lines(tmp_path / "r", ("a.py::x", "failed"), ("a.py::x", "passed")))["a.py"][
        0
    ].is_good


def test_a_guest_that_said_nothing_has_no_cases(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == {}
