"""Nodes, clients and a directory in virtual time: whatever is lost, late or crashes, no value is wrong or lost, and
none is anywhere that was there before it was removed everywhere."""

from __future__ import annotations

import pytest

from tests.kvstore.simulation import LAST_EVENTS, Simulation
from tests.thoroughness import THOROUGH

# What a seed must have met to prove anything.
MET = {
    "stored",
    "read under a lease",
    "read too late",
    "peeked",
    "changed while peeking",
    "copied",
    "arrived corrupt",
    "Lost",
    "crash",
    "compact",
    "directory",
    "removed everywhere",
    "removed without hearing of it",
    "not copied since it was removed",
}


def test_five_thousand_operations_read_what_was_committed_or_miss() -> None:
    world = Simulation(seed=1)
    world.run(5_000)
    assert world.outcomes.keys() >= {"stored", "read under a lease", "peeked", "crash"}
    assert world.outcomes["removed everywhere"]


@pytest.mark.slow  # fifty thousand operations take ten seconds
@pytest.mark.parametrize("seed", range(11, 19) if THOROUGH else (11, 12))
def test_a_hundred_thousand_operations_read_what_was_committed_or_miss(seed: int) -> None:
    world = Simulation(seed)
    world.run(50_000)
    assert world.outcomes.keys() >= MET
    restored = sum(node.state.counters["objects_restored"] for node in world.nodes)
    assert restored, "no restart found anything on disk"


def test_a_seed_runs_the_same_each_time() -> None:
    first, second = Simulation(seed=3), Simulation(seed=3)
    for world in (first, second):
        world.run(500)
    assert list(first.trace) == list(second.trace)
    assert first.outcomes == second.outcomes


def test_a_wrong_value_fails_with_the_last_events() -> None:
    world = Simulation(seed=4)
    world.run_for(500)
    for node in world.nodes:
        node.memory.write(0, node.memory.nbytes, 12345)
    with pytest.raises(AssertionError, match="seed 4 after") as failed:
        world.run(1_000)
    assert str(failed.value).count("\n") == LAST_EVENTS
