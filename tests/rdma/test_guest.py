"""Runs tests/rdma/inside in the guest, once, and says file by file what became of them."""

import sys
from pathlib import Path

import pytest

from tests.rdma.expected import Expected
from tests.rdma.guest.machine import REPOSITORY, run, why_unavailable
from tests.rdma.reports import Case, read
from tests.thoroughness import THOROUGH

INSIDE = Path(__file__).parent / "inside"
GUEST_TIMEOUT_S = 1_200.0
"""With the cluster it took 264 s alone on the machine and 984 s beside all other tests."""
LEFT_OUT = {
    INSIDE / "test_cluster.py": "a cluster in the guest takes minutes",
    INSIDE / "test_rails.py": "the guest's own rails, by perftest, take a fifth of its time",
}
"""Emulated processors import torch in a minute. These run when the guest is what is asked for."""
UNAVAILABLE = why_unavailable()

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.slow,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no guest with Soft-RoCE: {UNAVAILABLE}"),
    pytest.mark.timeout(GUEST_TIMEOUT_S + 60),
]


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
        tests += "".join(f" --ignore {file.relative_to(REPOSITORY)}" for file in LEFT_OUT)
    run(f"python -m pytest -v -p no:cacheprovider {tests}", results, GUEST_TIMEOUT_S, _say)
    return read(results / "reports.jsonl")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@pytest.mark.parametrize("file", sorted(INSIDE.glob("test_*.py")), ids=lambda file: file.name)
def test_the_guests_tests_pass(file: Path, cases: dict[str, list[Case]], is_whole: bool) -> None:
    if file in LEFT_OUT and not is_whole:
        pytest.skip(f"{LEFT_OUT[file]}: make test-rdma")
    ran = cases.get(str(file.relative_to(REPOSITORY)), [])
    assert ran, (
        "the guest collected no test from this file; its output is above, with the first file"
    )
    if bad := [case for case in ran if not case.is_good]:
        pytest.fail("\n".join(map(str, bad)), pytrace=False)
