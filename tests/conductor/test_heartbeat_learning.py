"""What heartbeats tell of steps and bandwidths changes what is predicted. The pure state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from conductor.cost.bandwidth import DEFAULT_BYTES_PER_S
from conductor.cost.correction import reports_to_converge
from conductor.events import Load, Steps, Traffic
from protocol.ids import InstanceId, RequestId, Role
from tests.conductor.cluster import DECODE, LAYOUT, Cluster, chain, pair, worker

SEQUENCES, CONTEXT = 4, 900


def steps_of(number: int, slower: float) -> Steps:
    seconds = number * slower * DECODE.step_s(SEQUENCES, CONTEXT)
    return Steps(
        num_steps=number,
        seconds=seconds,
        sequences=number * SEQUENCES,
        context_tokens=number * CONTEXT,
    )


def predicted_tbt_s(cluster: Cluster, name: str) -> float:
    return cluster.place(name, tokens=10).predicted_tbt_s


def beat_with_steps(cluster: Cluster, slower: float, reports: int) -> None:
    for number in range(1, reports + 2):  # the first one says from where to count
        load = Load(free_blocks=1000, steps=steps_of(100 * number, slower))
        cluster.heartbeat("d0", load)


def test_decode_predictions_follow_the_steps_that_are_observed() -> None:
    before, twice = pair(), pair()
    beat_with_steps(twice, 2.0, reports_to_converge(2.0, 0.05))
    assert predicted_tbt_s(twice, "r0") == pytest.approx(
        2.0 * predicted_tbt_s(before, "r0"), rel=0.06
    )


def test_totals_of_an_earlier_time_and_totals_that_go_back_teach_nothing() -> None:
    cluster, untaught = pair(), pair()
    cluster.heartbeat("d0", Load(free_blocks=1000, steps=steps_of(10_000, 3.0)))
    cluster.heartbeat("d0", Load(free_blocks=1000, steps=steps_of(5_000, 3.0)))
    assert predicted_tbt_s(cluster, "r0") == predicted_tbt_s(untaught, "r0")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_steps_that_cannot_be_are_ignored(seconds: float) -> None:
    cluster, untaught = pair(), pair()
    for number in (1, 2):
        steps = replace(steps_of(number, 1.0), seconds=number * seconds)
        cluster.heartbeat("d0", Load(free_blocks=1000, steps=steps))
    assert predicted_tbt_s(cluster, "r0") == predicted_tbt_s(untaught, "r0")


def far_pair() -> Cluster:
    """The prefix is in another host's store, and has to come over the network."""
    cluster = pair()
    cluster.store("s0", host="another")
    cluster.heartbeat("s0", holds=chain("a", 20))
    return cluster


def transfer_s(cluster: Cluster, name: str) -> float:
    cluster.place(name, keys=chain("a", 20), tokens=205)
    decision = cluster.state.explain(RequestId(name))
    assert decision is not None
    [candidate] = decision.prefill_candidates
    return candidate.transfer_s


def beat_with_reads(cluster: Cluster, bytes_per_s: float, peer: str = "s0") -> None:
    for number in range(41):
        nbytes = number * (64 << 20)
        traffic = Traffic(peer=InstanceId(peer), read_bytes=nbytes, read_s=nbytes / bytes_per_s)
        cluster.heartbeat("p0", Load(free_blocks=1000, traffic=(traffic,)))


def test_transfers_are_predicted_from_the_bandwidth_that_a_worker_saw() -> None:
    cluster = far_pair()
    assumed_s = 20 * LAYOUT.block_bytes / DEFAULT_BYTES_PER_S
    assert transfer_s(far_pair(), "r0") == pytest.approx(assumed_s)
    beat_with_reads(cluster, DEFAULT_BYTES_PER_S / 4)
    assert transfer_s(cluster, "r0") == pytest.approx(4 * assumed_s, rel=0.1)


def test_loads_from_the_home_store_are_predicted_from_what_was_seen_too() -> None:
    loads = []
    for seen in (None, 1e8):
        cluster = Cluster()
        cluster.store("s0")
        cluster.prefill("p0", host="host-of-s0", home="s0")
        cluster.decode("d0")
        cluster.heartbeat("s0", holds=chain("a", 20))
        if seen is not None:
            beat_with_reads(cluster, seen)
        cluster.place("r0", keys=chain("a", 20), tokens=205)
        decision = cluster.state.explain(RequestId("r0"))
        assert decision is not None
        loads.append(decision.prefill_candidates[0].load_s)
    assert loads[1] == pytest.approx(20 * LAYOUT.block_bytes / 1e8, rel=0.1)
    assert loads[0] < loads[1] / 10


def test_traffic_with_strangers_and_decode_workers_is_no_matter() -> None:
    cluster = far_pair()
    before = transfer_s(far_pair(), "r0")
    for peer in ("nobody", "d0", "p0"):
        beat_with_reads(cluster, 1e6, peer)
    cluster.state.validate()
    assert transfer_s(cluster, "r0") == pytest.approx(before)


def test_a_worker_tells_how_large_its_steps_are() -> None:
    """One that takes 100 tokens at a time lets others in after half of that, 10 ms each."""
    told = replace(worker("p0", Role.PREFILL), max_num_batched_tokens=100)
    for registration, step_s in ((told, 0.5), (worker("p0", Role.PREFILL), 40.96)):
        cluster = Cluster()
        cluster.join(registration)
        [instance] = cluster.state._members.with_role(Role.PREFILL)
        assert instance.queue._work._step_s == pytest.approx(step_s)
