"""Tests of learning: reports and heartbeats change predictions, and never cause rejections for good."""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from moonserve.conductor.events import Load, Placed, StepTotals, Tick, TrafficTotals
from moonserve.conductor.prediction.accuracy import Term
from moonserve.conductor.prediction.transfer_time import DEFAULT_BYTES_PER_S
from moonserve.conductor.wire import report_from_wire
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.request import InstanceId, RequestPhase, Role
from moonserve.protocol.step_time import DecodeProfile
from tests.conductor.cluster import DECODE, LAYOUT, Cluster, chain

NEAR = pytest.approx
ODD = [math.nan, math.inf, -1.0, 0.0]


def ran(cluster: Cluster, request_id: str, elapsed_s: float, **times: float) -> None:
    """Runs a prompt of 100 tokens from placement to end. Prefill worker p1 is excluded."""
    cluster.place(request_id, excluded_instances=frozenset({"p1"}))
    cluster.report(request_id, RequestPhase.FIRST_TOKEN, elapsed_s, **times)
    cluster.report(request_id, RequestPhase.FINISHED, output_tokens=5)


def test_slow_instance_is_predicted_by_its_reports() -> None:
    cluster = Cluster("p0", "d0")
    for number in range(5):  # reports without terms teach nothing about an instance
        ran(cluster, f"s{number}", 9.0)
    assert cluster.place("before").predicted_ttft_s == NEAR(1.0)
    cluster.report("before", RequestPhase.CANCELLED)
    cluster.prefill("p1")
    for number in range(20):
        ran(cluster, f"r{number}", 2.0, prefill_s=2.0)  # 1 s by its profile
    placed = cluster.place("last", excluded_instances=frozenset({"p1"}))
    assert placed.predicted_ttft_s == NEAR(2.0, rel=0.05)
    assert cluster.place("other").prefill.instance_id == "p1"


def test_profile_of_zeros_and_missing_limit_are_accepted() -> None:
    cluster = Cluster("p0")
    cluster.decode("d0", decode_profile=DecodeProfile(c0=0.0, c1=0.0, c2=0.0))
    for number in range(3):
        cluster.place(f"r{number}", max_tokens=0)
    cluster.report("r0", RequestPhase.FIRST_TOKEN)
    cluster.now += 5.0
    cluster.heartbeat("d0", Load(num_running=1, free_blocks=1000))
    assert cluster.place("last").predicted_tbt_s == 0.0


def test_errors_are_reported_per_term_as_shares_of_the_ttft() -> None:
    """Errors are shares of the actual TTFT, by term: 1 s predicted for 1.25 s is a bias of -0.2, all in the queue."""
    cluster = Cluster("p0", "d0")
    assert cluster.state.ttft_accuracy() == {}
    for number in range(10):
        ran(cluster, f"r{number}", 1.25, prefill_s=1.0, queue_s=0.25, transfer_s=0.0)
    accuracy = cluster.state.ttft_accuracy()
    assert (accuracy[Term.TTFT].bias, accuracy[Term.QUEUE].bias) == (NEAR(-0.2), NEAR(-0.2))
    assert accuracy[Term.TTFT].p50 == NEAR(0.2, rel=0.1)
    assert accuracy[Term.PREFILL].p90 < 0.01
    assert cluster.state.cluster(cluster.now).ttft_accuracy == accuracy


@pytest.mark.parametrize("odd", [-1.0, math.inf, math.nan])
def test_impossible_times_are_ignored(odd: float) -> None:
    first = conductor_pb2.ReportRequest.PHASE_FIRST_TOKEN
    report = report_from_wire(conductor_pb2.ReportRequest(phase=first, prefill_s=odd))
    assert (report.queue_s, report.transfer_s, report.prefill_s) == (None, None, None)


def steps_of(number: int, slower: float, seconds: float | None = None) -> Load:
    """Returns a load of `number` steps of 4 sequences and 900 tokens: `seconds`, or `slower` times the profile's."""
    took_s = number * slower * DECODE.step_s(4, 900) if seconds is None else number * seconds
    steps = StepTotals(num_steps=number, seconds=took_s, sequences=number * 4, context_tokens=number * 900)
    return Load(free_blocks=1000, steps=steps)


@pytest.mark.parametrize(
    ("loads", "times"),
    [
        # The first heartbeat only gives the baseline of the totals.
        ([steps_of(100 * number, 2.0) for number in range(1, 17)], NEAR(2.0, rel=0.06)),
        ([steps_of(10_000, 3.0), steps_of(5_000, 3.0)], 1.0),  # totals that decrease
        *(([steps_of(1, 1.0, odd), steps_of(2, 1.0, odd)], 1.0) for odd in ODD),
    ],
)
def test_decode_predictions_follow_observed_steps(loads: list[Load], times: float) -> None:
    cluster = Cluster("p0", "d0")
    for load in loads:
        cluster.heartbeat("d0", load)
    untaught_s = Cluster("p0", "d0").place("r0", tokens=10).predicted_tbt_s
    assert cluster.place("r0", tokens=10).predicted_tbt_s / untaught_s == times


KEYS = chain("a", 20)


@pytest.mark.parametrize(
    ("peer", "home", "bytes_per_s", "expected"),
    [
        ("s0", False, DEFAULT_BYTES_PER_S / 4, NEAR(DEFAULT_BYTES_PER_S / 4, rel=0.1)),
        ("s0", True, 1e8, NEAR(1e8, rel=0.1)),
        *((peer, False, 1e6, NEAR(DEFAULT_BYTES_PER_S)) for peer in ("nobody", "d0", "p0")),
    ],
)
def test_prefix_transfer_is_predicted_by_observed_bandwidth(
    peer: str, home: bool, bytes_per_s: float, expected: float
) -> None:
    """`home`: the store with the prefix is the worker's home store, and otherwise on another host."""
    cluster = Cluster("s0", "d0")
    cluster.prefill("p0", host="host-of-s0" if home else None, home_store="s0" if home else None)
    cluster.heartbeat("s0", holds=KEYS)
    for number in range(41):
        nbytes = number * (64 << 20)
        traffic = TrafficTotals(peer=InstanceId(peer), read_bytes=nbytes, read_s=nbytes / bytes_per_s)
        cluster.heartbeat("p0", Load(free_blocks=1000, traffic=(traffic,)))
    cluster.place("r0", keys=KEYS, tokens=205)
    [candidate] = cluster.explain("r0").prefill_candidates
    seconds = candidate.load_s if home else candidate.transfer_s
    assert 20 * LAYOUT.block_bytes / seconds == expected


@pytest.mark.parametrize(("told", "waits_s"), [(100, 0.5), (0, 40.96)])
def test_worker_reports_its_step_size(told: int, waits_s: float) -> None:
    """A prompt waits for half a step: of 100 tokens of 10 ms, or of 8,192 if the worker reports no step size."""
    cluster = Cluster(policy="moonserve")
    cluster.prefill("p0", max_num_batched_tokens=told, max_model_len=99_999)
    cluster.decode("d0", max_model_len=99_999, num_blocks=99_999)
    [instance] = cluster.state._members.with_role(Role.PREFILL)
    instance.queue.add("running", 100.0, 10_000, cluster.now, rank=1000.0)  # type: ignore[arg-type]
    assert instance.queue.wait_for(cluster.now, 0.0) == (NEAR(waits_s), 1)


def slow_first_tokens(cluster: Cluster, number: int, *, elapsed_s: float, prefill_s: float) -> None:
    cluster.now += elapsed_s
    times = {"queue_s": 0.0, "transfer_s": 0.0, "prefill_s": prefill_s}
    ran(cluster, f"r{number}", elapsed_s, **times)


def slow_steps(cluster: Cluster, number: int) -> None:
    """Reports steps of one sequence that take 70 ms, for which the profile says 10 ms."""
    steps = StepTotals(num_steps=10 * number, sequences=10.0 * number, seconds=0.7 * number)
    cluster.now += 1.0
    cluster.heartbeat("d0", Load(free_blocks=1000, steps=steps))


def fading() -> Cluster:
    return Cluster("p0", "d0", ttft_slo_s=2.0, tbt_slo_s=0.05, lease_s=1e6, validates=False)


@pytest.mark.parametrize(
    "teach",
    [
        partial(slow_first_tokens, elapsed_s=9.0, prefill_s=1.0),  # mostly other time than compute
        partial(slow_first_tokens, elapsed_s=6.0, prefill_s=6.0),
        slow_steps,
    ],
    ids=["ways", "prefill", "steps"],
)
def test_unconfirmed_estimate_that_causes_rejections_decays_within_seconds(
    teach: Callable[[Cluster, int], None],
) -> None:
    cluster, number = fading(), 0
    while isinstance(cluster.ask("probe"), Placed):
        cluster.report("probe", RequestPhase.CANCELLED)
        teach(cluster, number := number + 1)
        assert number < 60, "nobody was refused"
    began = cluster.now
    while not isinstance(cluster.ask("again"), Placed):  # once a second, like a rejected client that retries
        cluster.now += 1.0
        cluster.send(Tick())
        assert cluster.now < began + 120.0, "refused for good"
    assert 1.0 <= cluster.now - began <= 30.0
    cluster.state.validate()


def test_estimates_do_not_decay_without_rejections() -> None:
    cluster = fading()
    for number in range(3):
        slow_first_tokens(cluster, number, elapsed_s=1.3, prefill_s=1.2)
    before = cluster.place("before").predicted_ttft_s
    cluster.report("before", RequestPhase.CANCELLED)
    for _ in range(600):
        cluster.now += 1.0
        cluster.send(Tick())
    assert cluster.place("after").predicted_ttft_s == before


def test_intervals_contain_four_of_five_actual_values() -> None:
    """Also where predictions are wrong on the whole: steps take 1.5 times as long as the profile says, and vary."""
    cluster, dice = Cluster("p0", "d0", validates=False), random.Random(1)
    first = cluster.place("first")
    assert (cluster.explain("first").tbt_range_s, cluster.explain("first").output_range) == (None, None)
    inside = []
    for number in range(900):
        name = f"r{number}"
        cluster.place(name, max_tokens=1_000)
        decision = cluster.explain(name)
        tokens = int(dice.lognormvariate(4.0, 0.8)) + 2
        tbt_s = 1.5 * first.predicted_tbt_s * dice.lognormvariate(0.0, 0.3)
        cluster.report(name, RequestPhase.FIRST_TOKEN, 1.0)
        cluster.report(name, RequestPhase.FINISHED, 1.0 + tbt_s * (tokens - 1), output_tokens=tokens)
        if number >= 300:
            assert decision.tbt_range_s is not None
            assert decision.output_range is not None
            within_s, within = decision.tbt_range_s, decision.output_range
            inside.append((within_s[0] <= tbt_s <= within_s[1], within[0] <= tokens <= within[1]))
    assert [sum(each) / len(inside) for each in zip(*inside, strict=True)] == [NEAR(0.8, abs=0.06)] * 2
