"""Prefixes on their way delay those that come after them, and what was measured is believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.events import Phase, Register
from protocol.ids import RequestId, Role
from tests.conductor.cluster import Cluster, chain, endpoint, worker

SHARED = chain("a", 99)  # of 1 MB: 99 ms over the default network, 0.99 s of computing


def holder() -> Cluster:
    """One store has everything, two prefill workers on other hosts have nothing."""
    cluster = Cluster(threshold=1.0)
    cluster.store("s0")
    cluster.heartbeat("s0", holds=SHARED)
    for name in ("p0", "p1"):
        cluster.prefill(name)
    cluster.decode("d0")
    return cluster


def transfer_s(cluster: Cluster, request_id: str) -> dict[str, float]:
    """Predicted for each candidate of a prompt that shares everything."""
    cluster.place(request_id, keys=SHARED, tokens=1000)
    decided = cluster.state.explain(RequestId(request_id))
    assert decided is not None
    return {c.instance_id: c.transfer_s for c in decided.prefill_candidates}


def test_a_sender_that_is_busy_takes_longer_until_its_bytes_have_arrived() -> None:
    """Two equal flows share the sender's link; when one is through, so is the other."""
    cluster = holder()
    assert transfer_s(cluster, "r0") == pytest.approx({"p0": 0.099, "p1": 0.099})
    assert transfer_s(cluster, "r1") == pytest.approx({"p0": 0.198, "p1": 0.198})
    cluster.now += 1.0  # nobody has reported, but all must be there
    assert transfer_s(cluster, "r2") == pytest.approx({"p0": 0.099, "p1": 0.099})


@pytest.mark.parametrize("phase", [Phase.FIRST_TOKEN, Phase.FAILED, Phase.CANCELLED])
def test_what_is_over_takes_its_transfer_with_it(phase: Phase) -> None:
    cluster = holder()
    transfer_s(cluster, "r0")
    cluster.report("r0", phase)
    assert transfer_s(cluster, "r1") == pytest.approx({"p0": 0.099, "p1": 0.099})


def test_a_request_that_is_placed_again_is_not_on_its_way_twice() -> None:
    cluster = holder()
    transfer_s(cluster, "r0")
    assert transfer_s(cluster, "r0") == pytest.approx({"p0": 0.099, "p1": 0.099})


def test_rates_are_those_that_instances_registered() -> None:
    cluster = Cluster(threshold=1.0)
    cluster.join(
        Register(
            endpoint=endpoint("s0", host="box"),
            role=Role.STORE,
            bytes_per_s=2e9,
            local_bytes_per_s=10e9,
        )
    )
    cluster.heartbeat("s0", holds=SHARED)
    near = worker("p0", Role.PREFILL, host="box")
    cluster.join(replace(near, local_bytes_per_s=10e9))
    cluster.join(replace(worker("p1", Role.PREFILL), bytes_per_s=0.5e9))
    cluster.join(replace(worker("p2", Role.PREFILL), bytes_per_s=8e9))
    cluster.decode("d0")
    seconds = transfer_s(cluster, "r0")
    assert seconds == pytest.approx({"p0": 0.0099, "p1": 0.198, "p2": 0.0495})


def test_a_home_store_is_read_at_the_rate_that_its_worker_registered() -> None:
    cluster = Cluster()
    cluster.store("s0", host="box")
    cluster.heartbeat("s0", holds=SHARED)
    at_home = worker("p0", Role.PREFILL, host="box", home="s0")
    cluster.join(replace(at_home, local_bytes_per_s=1e9))
    cluster.decode("d0")
    cluster.place("r0", keys=SHARED, tokens=1000)
    decided = cluster.state.explain(RequestId("r0"))
    assert decided is not None
    assert decided.prefill_candidates[0].load_s == pytest.approx(0.099)


def test_members_that_leave_take_their_flows_and_leave_their_places() -> None:
    cluster = holder()
    transfer_s(cluster, "r0")
    cluster.join(replace(worker("p0", Role.PREFILL), endpoint=endpoint("p0", epoch=2)))
    cluster.join(replace(worker("p1", Role.PREFILL), endpoint=endpoint("p1", epoch=2)))
    assert transfer_s(cluster, "r1") == pytest.approx({"p0": 0.099, "p1": 0.099})
    cluster.report("r0", Phase.FINISHED)
