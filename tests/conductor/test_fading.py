"""Nobody is refused for good by what was learned when the machines were busy with something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conductor.events import Heartbeat, Load, Phase, Placed, Steps, Tick
from conductor.limits import Limits
from protocol.ids import InstanceId
from tests.conductor.cluster import Cluster

TTFT_SLO_S = 2.0  # a prompt of 100 tokens takes 1 s
LIMITS = Limits(ttft_slo_s=TTFT_SLO_S, tbt_slo_s=0.05, lease_s=1e6)


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster(limits=LIMITS)
    cluster.prefill("p0")
    cluster.decode("d0")
    return cluster


def is_placed(cluster: Cluster, name: str) -> bool:
    return isinstance(cluster.ask(name), Placed)


def serve(cluster: Cluster, name: str, **took: float) -> None:
    """One request from the placement to the end."""
    assert is_placed(cluster, name)
    cluster.now += took["elapsed_s"]
    cluster.report(name, Phase.FIRST_TOKEN, **took)
    cluster.report(name, Phase.FINISHED, output_tokens=2)


def seconds_until_placed(cluster: Cluster) -> float:
    """Asked once a second, as a client that is refused asks."""
    began = cluster.now
    while not is_placed(cluster, f"again-{cluster.now}"):
        cluster.now += 1.0
        cluster.send(Tick())
        assert cluster.now < began + 120.0, "refused for good"
    return cluster.now - began


def slow(cluster: Cluster, *, elapsed_s: float, prefill_s: float) -> None:
    """Requests took so long to their first tokens, until one is refused."""
    for number in range(60):
        if not is_placed(cluster, f"probe-{number}"):
            return
        cluster.report(f"probe-{number}", Phase.CANCELLED)
        took = {"elapsed_s": elapsed_s, "queue_s": 0.0, "transfer_s": 0.0, "prefill_s": prefill_s}
        serve(cluster, f"r{number}", **took)
    pytest.fail("nobody was refused")


def slow_ways(cluster: Cluster) -> None:
    """First tokens took 1 s of computing and more and more beside it."""
    slow(cluster, elapsed_s=9.0, prefill_s=1.0)


def slow_prefill(cluster: Cluster) -> None:
    slow(cluster, elapsed_s=6.0, prefill_s=6.0)


def slow_steps(cluster: Cluster) -> None:
    """A step of one sequence takes 10 ms by the formula."""
    for number in range(1, 60):
        steps = Steps(num_steps=10 * number, sequences=10.0 * number, seconds=0.7 * number)
        load = Load(free_blocks=1000, steps=steps)
        cluster.now += 1.0
        cluster.send(Heartbeat(instance_id=InstanceId("d0"), epoch=1, load=load))
        if not is_placed(cluster, f"probe-{number}"):
            return
        cluster.report(f"probe-{number}", Phase.CANCELLED)
    pytest.fail("nobody was refused")


@pytest.mark.parametrize("learned", [slow_ways, slow_prefill, slow_steps])
def test_who_is_refused_for_what_nobody_confirms_any_more_is_let_in_within_seconds(
    cluster: Cluster, learned: Callable[[Cluster], None]
) -> None:
    learned(cluster)
    assert 1.0 <= seconds_until_placed(cluster) <= 30.0


def test_where_nobody_is_refused_nothing_is_forgotten(cluster: Cluster) -> None:
    for number in range(3):
        serve(cluster, f"r{number}", elapsed_s=1.3, queue_s=0.0, transfer_s=0.0, prefill_s=1.2)
    before = cluster.place("before").predicted_ttft_s
    cluster.report("before", Phase.CANCELLED)
    for _ in range(600):
        cluster.now += 1.0
        cluster.send(Tick())
    assert cluster.place("after").predicted_ttft_s == before
