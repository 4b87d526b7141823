"""Who is turned away, why, and when to come back; which decode instance is chosen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conductor.events import Load, Phase, PlacementForgotten, Rejected, Tick, TtftObserved
from conductor.limits import Limits
from protocol.errors import InvalidRequest, NoWorker
from protocol.ids import RequestId, Role
from tests.conductor.cluster import Cluster, chain, endpoint, pair, worker


def with_slo(*, ttft_s: float = 1000.0, tbt_s: float = 1000.0, lease_s: float = 1e6) -> Cluster:
    limits = Limits(ttft_slo_s=ttft_s, tbt_slo_s=tbt_s, lease_s=lease_s)
    cluster = Cluster(limits=limits)
    cluster.prefill("p0")
    cluster.decode("d0")
    return cluster


def test_a_queue_beyond_the_ttft_slo_rejects_until_it_has_drained_enough() -> None:
    cluster = with_slo(ttft_s=2.5)
    cluster.place("r0")  # 1 s each
    cluster.place("r1")
    rejected = cluster.reject("r2")
    assert rejected.reason == "ttft_slo"
    assert rejected.predicted_ttft_s == pytest.approx(3.0)
    # r0 and r1 will have made their 10 tokens of 10 ms by the time its prompt is prefilled.
    assert rejected.predicted_tbt_s < 0.02
    assert rejected.retry_after_s == pytest.approx(0.5)
    cluster.now += rejected.retry_after_s + 0.01
    cluster.place("r2")


def test_retry_after_is_that_of_the_instance_that_is_free_first() -> None:
    cluster = with_slo(ttft_s=1.5)
    cluster.prefill("p1")
    cluster.place("r0", tokens=150)  # 1.5 s
    cluster.place("r1", tokens=120)  # 1.2 s
    assert cluster.reject("r2").retry_after_s == pytest.approx(0.7)


def test_a_prompt_that_no_idle_instance_could_serve_in_time_says_so() -> None:
    cluster = with_slo(ttft_s=0.5)
    rejected = cluster.reject("r0")
    assert rejected.reason == "ttft_slo_unreachable"
    assert rejected.retry_after_s > 0


def test_a_request_brings_its_own_slo() -> None:
    cluster = with_slo()
    assert cluster.reject("r0", ttft_slo_s=0.5).reason == "ttft_slo_unreachable"
    assert cluster.reject("r1", tbt_slo_s=0.001).reason == "tbt_slo_unreachable"


def test_predicted_tbt_over_the_slo_rejects_until_sequences_end() -> None:
    """Two sequences of 10 ms are the most; r0 runs from 1 s to 17 s or so, r1 from 2 s to 6 s."""
    cluster = with_slo(tbt_s=0.025)
    cluster.place("r0", max_tokens=1600)
    cluster.place("r1", max_tokens=200)
    rejected = cluster.reject("r2")
    assert rejected.reason == "tbt_slo"
    assert rejected.predicted_tbt_s == pytest.approx(0.03)
    # Its prompt takes 1 s and r1 ends at 6 s, so that it may come at 5 s, to the fineness of what is foreseen.
    assert 3.0 <= rejected.retry_after_s <= 6.0
    assert cluster.reject("r3", tbt_slo_s=0.015).retry_after_s > rejected.retry_after_s
    cluster.report("r1", Phase.FINISHED, output_tokens=200)
    cluster.place("r2")


def test_rejections_leave_nothing_in_the_books() -> None:
    cluster = with_slo(ttft_s=1.5)
    cluster.place("r0")
    for i in range(5):
        assert cluster.reject(f"x{i}").predicted_ttft_s == pytest.approx(2.0)


def test_decode_is_chosen_by_predicted_tbt_with_placements_not_in_heartbeats() -> None:
    cluster = with_slo()
    cluster.decode("d1")
    cluster.heartbeat("d0", Load(num_running=2, free_blocks=1000))
    chosen = [cluster.place(f"r{i}", max_tokens=2000).decode.instance_id for i in range(5)]
    assert chosen == ["d1", "d1", "d0", "d1", "d0"]


def test_a_heartbeat_that_counts_a_running_sequence_is_not_added_to_it() -> None:
    cluster = with_slo()
    cluster.place("r0", max_tokens=2000)
    cluster.now += 1.0
    cluster.report("r0", Phase.FIRST_TOKEN)
    cluster.now += 1.0
    cluster.heartbeat("d0", Load(num_running=1, context_tokens=101, free_blocks=989))
    assert cluster.place("r1", max_tokens=2000).predicted_tbt_s == pytest.approx(0.02)
    cluster.report("r0", Phase.FINISHED, output_tokens=2000)
    cluster.report("r1", Phase.FAILED)
    assert cluster.place("r2").predicted_tbt_s == pytest.approx(0.01)


def test_decode_instances_without_free_blocks_are_avoided() -> None:
    cluster = with_slo()
    cluster.decode("d1")
    cluster.heartbeat("d0", Load(free_blocks=5))
    cluster.heartbeat("d1", Load(free_blocks=500, num_running=10))
    assert cluster.place("r0").decode.instance_id == "d1"


def test_placed_prompts_reserve_decode_blocks_before_heartbeats_show_it() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    cluster.decode("d0", num_blocks=22)
    cluster.decode("d1", num_blocks=22)
    cluster.heartbeat("d0", Load(free_blocks=22))
    cluster.heartbeat("d1", Load(free_blocks=11, num_running=9))
    assert [cluster.place(f"r{i}").decode.instance_id for i in range(3)] == ["d0", "d0", "d1"]


def test_leased_blocks_are_not_subtracted_twice() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    cluster.decode("d0", num_blocks=22)
    cluster.place("r0")
    cluster.heartbeat("d0", Load(free_blocks=11, leased_blocks=11))
    cluster.place("r1")
    decided = cluster.state.explain(RequestId("r1"))
    assert decided is not None
    assert decided.predicted_landing_wait_s == 0.0


def test_waiting_for_landing_blocks_counts_towards_ttft() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    cluster.decode("d0", num_blocks=11)
    cluster.place("r0", max_tokens=200)  # begins at 1 s, ends at 3 s: 200 tokens of 10 ms
    waiting = cluster.place("r1")
    assert waiting.predicted_ttft_s == pytest.approx(3.0 + 1.0)
    rejected = cluster.reject("r2", ttft_slo_s=3.0)
    assert rejected.reason == "landing_blocks"


def test_a_decode_instance_with_a_free_slot_comes_first() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    cluster.join(replace(worker("d0", Role.DECODE), max_num_seqs=2))
    cluster.join(replace(worker("d1", Role.DECODE), max_num_seqs=100))
    cluster.heartbeat("d0", Load(num_running=2, free_blocks=1000))
    cluster.heartbeat("d1", Load(num_running=9, free_blocks=1000))
    assert cluster.place("r0").decode.instance_id == "d1"


def test_no_prefill_or_no_decode_worker_is_no_worker() -> None:
    cluster = Cluster()
    assert isinstance(cluster.refuse("r0"), NoWorker)
    cluster.prefill("p0")
    assert isinstance(cluster.refuse("r0"), NoWorker)
    cluster.decode("d0")
    cluster.place("r0")


def test_excluded_instances_are_honoured_and_none_left_is_no_worker() -> None:
    cluster = with_slo()
    cluster.prefill("p1")
    for i in range(4):
        placement = cluster.place(f"r{i}", excluded=frozenset({"p0"}))
        assert placement.prefill.instance_id == "p1"
    assert isinstance(cluster.refuse("x", excluded_instances=frozenset({"d0"})), NoWorker)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 4000},  # leaves no room for one generated token
        {"num_prompt_tokens": 15, "block_keys": chain("a", 2)},
    ],
)
def test_a_prompt_that_can_never_be_served_is_invalid(changes: dict[str, object]) -> None:
    cluster = with_slo()
    assert isinstance(cluster.refuse("r0", **changes), InvalidRequest)
    cluster.place("r1", tokens=3999)


def test_a_prompt_larger_than_every_decode_pool_is_invalid() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    cluster.decode("d0", num_blocks=10)
    assert isinstance(cluster.refuse("r0"), InvalidRequest)
    cluster.place("r1", tokens=99)


def test_the_running_prompt_is_worked_off_as_time_passes() -> None:
    cluster = with_slo()
    cluster.place("r0")
    cluster.place("r1")
    cluster.now += 0.4
    assert cluster.place("r2").predicted_ttft_s == pytest.approx(1.6 + 1.0)
    cluster.now += 10.0  # no more than the running one's own time
    assert cluster.place("r3").predicted_ttft_s == pytest.approx(2.0 + 1.0)
    cluster.report("r0", Phase.FIRST_TOKEN)
    assert cluster.place("r4").predicted_ttft_s == pytest.approx(3.0 + 1.0)


def test_a_heartbeat_corrects_the_queue_both_ways() -> None:
    cluster = with_slo()
    cluster.place("r0")
    cluster.place("r1")
    cluster.heartbeat("p0", Load(queued_tokens=0))
    assert cluster.place("r2").predicted_ttft_s == pytest.approx(3.0), "it may not know them yet"
    cluster.now += 0.6
    cluster.heartbeat("p0", Load(queued_tokens=150))
    assert cluster.place("r3").predicted_ttft_s == pytest.approx(3.0), "one of three is done"
    cluster.now += 10.0
    cluster.heartbeat("p0", Load(queued_tokens=0))
    assert cluster.place("r4").predicted_ttft_s == pytest.approx(1.0)
    cluster.heartbeat("p0", Load(num_waiting=2, queued_tokens=600))
    assert cluster.place("r5").predicted_ttft_s == pytest.approx(1.0 + 5.0 + 1.0)


def test_tokens_that_may_be_cached_are_not_mistaken_for_others_work() -> None:
    """An instance that has not looked yet reports all tokens of a prompt that waits. It is the prompt placed here."""
    cluster = with_slo()
    cluster.place("r0")
    cluster.heartbeat("p0", Load(num_running=1, queued_tokens=900))
    assert cluster.place("r1").predicted_ttft_s == pytest.approx(1.0 + 1.0)
    cluster.heartbeat("p0", Load(num_running=1, num_waiting=2, queued_tokens=900))
    assert cluster.place("r2").predicted_ttft_s == pytest.approx(2.0 + 7.0 + 1.0)


def test_placing_a_request_again_frees_its_first_placement() -> None:
    cluster = with_slo()
    cluster.place("r0")
    assert cluster.place("r0").predicted_ttft_s == pytest.approx(1.0)


def test_a_placement_that_nobody_reports_is_forgotten() -> None:
    cluster = with_slo()
    cluster.place("r0")
    cluster.now += 901.0
    assert cluster.send(Tick()) == [PlacementForgotten(request_id=RequestId("r0"))]
    assert cluster.place("r1").predicted_ttft_s == pytest.approx(1.0)


def test_outcomes_are_compared_with_predictions_once() -> None:
    cluster = pair()
    cluster.place("r0")
    observed = TtftObserved(request_id=RequestId("r0"), predicted_s=1.0, actual_s=1.25)
    assert cluster.report("r0", Phase.FIRST_TOKEN, 1.25)[0] == observed
    assert observed not in cluster.report("r0", Phase.FIRST_TOKEN, 1.25)
    cluster.report("r0", Phase.FINISHED, 3.5, output_tokens=10)
    decided = cluster.state.explain(RequestId("r0"))
    assert decided is not None
    assert decided.outcome is not None
    assert (decided.outcome.ttft_s, decided.outcome.elapsed_s) == (1.25, 3.5)
    assert decided.outcome.output_tokens == 10


def test_output_lengths_are_learnt_from_finished_requests() -> None:
    """20 tokens of 10 ms, not 1,000: its sequence is gone when the next one lands."""
    cluster = with_slo(tbt_s=0.015)
    cluster.place("r0", max_tokens=1000)
    assert cluster.reject("r1", max_tokens=1000).reason == "tbt_slo"
    cluster.report("r0", Phase.FINISHED, output_tokens=20)
    cluster.place("r1", max_tokens=1000)
    cluster.place("r2")
    decided = cluster.state.explain(RequestId("r2"))
    assert decided is not None
    assert decided.expected_output == 10.0, "its own limit"
    assert decided.decode_candidates[0].landing_seqs == pytest.approx(1.0, abs=0.05)


def test_a_decision_in_json_holds_all_candidates_and_the_reason() -> None:
    cluster = with_slo(ttft_s=1.5)
    cluster.prefill("p1")
    for i in range(3):
        reply = cluster.ask(f"r{i}", tenant="t")
    assert isinstance(reply, Rejected)
    record = json.loads(reply.decision.to_json())
    assert [c["instance_id"] for c in record["prefill_candidates"]] == ["p0", "p1"]
    assert {"prefix_blocks", "reuse_blocks", "transfer_s", "queue_s", "prefill_s", "ttft_s"} <= set(
        record["prefill_candidates"][0]
    )
    assert {"landing_seqs", "landing_tbt_s", "later_tbt_s", "spare_blocks", "fits"} <= set(
        record["decode_candidates"][0]
    )
    assert record["decode_candidates"][0]["tbt_s"] == pytest.approx(0.01)
    assert record["admission"] == "predicted"
    assert record["expected_output"] == 10.0
    assert record["balancing_threshold"] == 2.0
    assert record["rejection"]["reason"] == "ttft_slo"


def test_only_the_newest_decisions_are_kept() -> None:
    cluster = Cluster(limits=Limits(num_decisions=2))
    cluster.prefill("p0")
    cluster.decode("d0")
    for i in range(3):
        cluster.place(f"r{i}", tokens=10)
    kept = [cluster.state.explain(RequestId(f"r{i}")) is not None for i in range(3)]
    assert kept == [False, True, True]


def test_a_report_for_a_restarted_worker_does_not_touch_its_successor() -> None:
    cluster = pair()
    cluster.place("r0")
    cluster.join(replace(worker("p0", Role.PREFILL), endpoint=endpoint("p0", epoch=2)))
    cluster.place("r1")
    cluster.report("r0", Phase.FAILED)
    assert cluster.place("r2").predicted_ttft_s == pytest.approx(2.0)
    cluster.state.validate()
