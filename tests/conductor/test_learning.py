"""What reports teach: how slow an instance is now, how good predictions were, how long answers are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.cost.accuracy import Term
from conductor.events import Load, Phase
from conductor.wire import report_from_wire
from protocol.ids import RequestId, Role
from protocol.pb import conductor_pb2
from protocol.profile import DecodeProfile
from tests.conductor.cluster import Cluster, pair, worker


def ran(cluster: Cluster, request_id: str, *, prefill_s: float, queue_s: float = 0.0) -> None:
    """A prompt of 100 tokens, from its placement to its end."""
    cluster.place(request_id)
    cluster.report(
        request_id,
        Phase.FIRST_TOKEN,
        prefill_s + queue_s,
        prefill_s=prefill_s,
        queue_s=queue_s,
        transfer_s=0.0,
    )
    cluster.report(request_id, Phase.FINISHED, output_tokens=5)


def test_an_instance_that_computes_slower_than_it_said_is_believed_what_it_does() -> None:
    cluster = pair()
    cluster.prefill("p1")
    without = frozenset({"p1"})
    for number in range(20):
        request_id = f"r{number}"
        cluster.place(request_id, excluded=without)
        cluster.report(request_id, Phase.FIRST_TOKEN, 2.0, prefill_s=2.0)  # 1 s by its profile
        cluster.report(request_id, Phase.FINISHED)
    placed = cluster.place("last", excluded=without)
    assert placed.predicted_ttft_s == pytest.approx(2.0, rel=0.05)
    assert cluster.place("other").prefill.instance_id == "p1"


def test_a_profile_of_zeros_and_a_limit_of_none_break_no_book() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    nothing = DecodeProfile(c0=0.0, c1=0.0, c2=0.0)
    cluster.join(replace(worker("d0", Role.DECODE), decode_profile=nothing))
    for number in range(3):
        cluster.place(f"r{number}", max_tokens=0)
    cluster.report("r0", Phase.FIRST_TOKEN)
    cluster.now += 5.0
    cluster.heartbeat("d0", Load(num_running=1, free_blocks=1000))
    assert cluster.place("last").predicted_tbt_s == 0.0


def test_reports_without_times_teach_nothing_about_an_instance() -> None:
    cluster = pair()
    for number in range(5):
        cluster.place(f"r{number}")
        cluster.report(f"r{number}", Phase.FIRST_TOKEN, 9.0)
        cluster.report(f"r{number}", Phase.FINISHED)
    assert cluster.place("last").predicted_ttft_s == pytest.approx(1.0)


def test_errors_are_told_by_term_as_shares_of_the_ttft() -> None:
    """1 s was predicted and it took 1.25: a fifth of the actual time too short, all of it in the queue."""
    cluster = pair()
    assert cluster.state.ttft_accuracy() == {}
    for number in range(10):
        ran(cluster, f"r{number}", prefill_s=1.0, queue_s=0.25)
    accuracy = cluster.state.ttft_accuracy()
    assert accuracy[Term.TTFT].bias == pytest.approx(-0.2)
    assert accuracy[Term.QUEUE].bias == pytest.approx(-0.2)
    assert accuracy[Term.TTFT].p50 == pytest.approx(0.2, rel=0.1)
    assert accuracy[Term.PREFILL].p90 < 0.01
    assert cluster.state.cluster(cluster.now).ttft_accuracy == accuracy


@pytest.mark.parametrize("odd", [-1.0, float("inf"), float("nan")])
def test_times_that_cannot_be_are_as_if_they_were_not_sent(odd: float) -> None:
    message = conductor_pb2.ReportRequest(
        request_id="r0", phase=conductor_pb2.ReportRequest.PHASE_FIRST_TOKEN, prefill_s=odd
    )
    report = report_from_wire(message)
    assert report.request_id == RequestId("r0")
    assert (report.queue_s, report.transfer_s, report.prefill_s) == (None, None, None)
