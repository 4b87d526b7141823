"""Any order of sends, ends and failures: accounts of paths stay right, and the best path that works is taken."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.transfer.rails.ways import MIB, chooser, path
from transfer.rails.health import Condition, RailHealth
from transfer.rails.paths import Path


class ChooserMachine(RuleBasedStateMachine):
    """Any order of sends, ends and failures over three transports keeps the accounts and the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = [
            path("shm", "shm"),
            *(path("rdma", f"mlx5_{n}:1", remote=r) for n in range(2) for r in ("a", "b")),
            *(path("tcp", "eth0", stream=s) for s in range(2)),
        ]
        self.health = RailHealth()
        self.paths = chooser(*self.ways, health=self.health, compare_every_s=20.0)
        self.in_flight: list[tuple[Path, int, float]] = []
        self.now = 0.0

    @rule(seconds=st.sampled_from([0.001, 0.05, 1.0, 31.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        nbytes=st.sampled_from([1, 4096, MIB]),
        tried=st.sets(st.integers(0, 6)),
        location=st.sampled_from(["cpu:0", "cuda:1", ""]),
    )
    def send(self, nbytes: int, tried: set[int], location: str) -> None:
        avoided = [self.ways[n] for n in tried]
        way = self.paths.choose(location, nbytes, self.now, avoided)
        assert (way is None) == (len(tried) == len(self.ways))
        if way is None:
            return
        assert way not in avoided
        self._assert_the_best_that_works(way, avoided)
        self.paths.sent(way, nbytes)
        self.in_flight.append((way, nbytes, self.now))

    def _assert_the_best_that_works(self, way: Path, avoided: Sequence[Path]) -> None:
        left = [other for other in self.ways if other not in avoided]
        if self.health.condition(way.rails, self.now) is not Condition.HEALTHY:
            healthy = [
                other
                for other in left
                if self.health.condition(other.rails, self.now) is Condition.HEALTHY
                and self.paths.transports.index(other.transport)
                < self.paths.transports.index(way.transport)
            ]
            assert not healthy or self.health.condition(way.rails, self.now) is Condition.TRIAL
        if self.health.condition(way.rails, self.now) is Condition.RESTING:
            assert all(
                self.health.condition(other.rails, self.now) is not Condition.HEALTHY
                for other in left
            )

    @rule(position=st.integers(0, 1000), outcome=st.sampled_from(["done", "failed", "dropped"]))
    def end(self, position: int, outcome: str) -> None:
        if not self.in_flight:
            return
        way, nbytes, sent_at = self.in_flight.pop(position % len(self.in_flight))
        if outcome == "done":
            self.paths.done(way, nbytes, self.now - sent_at, self.now)
        elif outcome == "failed":
            self.paths.failed(way, nbytes, self.now)
        else:
            self.paths.dropped(way, nbytes)

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.paths.validate()
        for term in self.paths.explain("cpu:0", self.now):
            expected = sum(nbytes for way, nbytes, _ in self.in_flight if way is term.path)
            assert term.in_flight_bytes == expected
            assert term.bandwidth_bytes_s > 0


TestChooserMachine = ChooserMachine.TestCase
