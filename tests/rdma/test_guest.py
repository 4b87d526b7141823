"""Runs tests/rdma/inside in the guest, once, and says file by file what became of them."""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rdma.expected import Expected
from tests.rdma.guest.machine import REPOSITORY, run, why_unavailable
from tests.thoroughness import THOROUGH

INSIDE = Path(__file__).parent / "inside"
GUEST_TIMEOUT_S = 1_200.0
"""With the cluster it took 264 s alone on the machine and 984 s beside all other tests."""
CLUSTER = INSIDE / "test_cluster.py"
"""Takes minutes, as emulated processors import torch in one. It runs when the guest is what is asked for."""
UNAVAILABLE = why_unavailable()

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.slow,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no guest with Soft-RoCE: {UNAVAILABLE}"),
    pytest.mark.timeout(GUEST_TIMEOUT_S + 60),
]


@dataclass(frozen=True)
class Case:
    nodeid: str
    outcome: str
    """passed, failed, skipped; "started" when the guest ended first."""
    text: str
    duration_s: float

    @property
    def is_good(self) -> bool:
        return self.outcome in ("passed", "skipped")

    def __str__(self) -> str:
        return f"{self.outcome} {self.nodeid} ({self.duration_s:.1f} s)\n{self.text}"


def outcomes(path: Path) -> dict[str, list[Case]]:
    """{file: its cases, each with the last thing said of it}; a failure stays one."""
    last: dict[str, Case] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        case = Case(**json.loads(line))
        if case.nodeid not in last or last[case.nodeid].outcome != "failed":
            last[case.nodeid] = case
    by_file: defaultdict[str, list[Case]] = defaultdict(list)
    for case in last.values():
        by_file[case.nodeid.split("::")[0]].append(case)
    return dict(by_file)


@pytest.fixture(scope="module")
def is_whole(pytestconfig: pytest.Config) -> bool:
    return THOROUGH or pytestconfig.option.markexpr == "rdma"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, is_whole: bool) -> dict[str, list[Case]]:
    results = tmp_path_factory.mktemp("guest")
    if is_whole:
        Expected.compute().write(results)
    tests = f"{INSIDE.relative_to(REPOSITORY)}"
    if not is_whole:
        tests += f" --ignore {CLUSTER.relative_to(REPOSITORY)}"
    run(f"python -m pytest -v -p no:cacheprovider {tests}", results, GUEST_TIMEOUT_S, _say)
    return outcomes(results / "reports.jsonl")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@pytest.mark.parametrize("file", sorted(INSIDE.glob("test_*.py")), ids=lambda file: file.name)
def test_the_guests_tests_pass(file: Path, cases: dict[str, list[Case]], is_whole: bool) -> None:
    if file == CLUSTER and not is_whole:
        pytest.skip("a cluster in the guest takes minutes: make test-rdma")
    ran = cases.get(str(file.relative_to(REPOSITORY)), [])
    assert ran, (
        "the guest collected no test from this file; its output is above, with the first file"
    )
    if bad := [case for case in ran if not case.is_good]:
        pytest.fail("\n".join(map(str, bad)), pytrace=False)
