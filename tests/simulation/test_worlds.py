"""Small simulated clusters survive crashes, stops, cut links and overload. This suite runs the first seeds; CI runs a
thousand (`make simulate`).

The worlds run in a separate process, in which the order of sets is deterministic. `python -m tests.simulation --seed S`
prints the history of a world that failed here.
"""

import pytest

from tests.processes import run_module
from tests.thoroughness import examples

MET = (
    *("stored", "arrived corrupt", "read under a lease", "peeked", "changed while peeking"),
    *("copied", "peer_lost", "removed everywhere", "removed without hearing of it"),
)


def simulate(*arguments: str) -> str:
    """Runs the simulation and returns its output. Fails with the output if a world had a problem."""
    done = run_module("tests.simulation", *arguments, PYTHONHASHSEED="0")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def first_worlds() -> str:
    return simulate("--seeds", str(max(25, examples(60))))


def test_every_request_ends_once_with_the_right_tokens_and_leaves_nothing(first_worlds: str) -> None:
    assert "'finished': " in first_worlds


def test_a_pool_returns_committed_data_or_a_miss(first_worlds: str) -> None:
    """The pool worlds, which verify every value they read, have met all outcomes in MET."""
    missed = [met for met in MET if f"'{met}': " not in first_worlds]
    assert not missed


def test_a_cluster_without_faults_serves_every_request() -> None:
    simulate("--seeds", "5", "--calm")


def test_equal_seeds_have_equal_histories() -> None:
    assert simulate("--seed", "11") == simulate("--seed", "11")
