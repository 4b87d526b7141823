"""Tests of admission: rejections with reason and retry time, choice of the decode instance, books, decision records."""

import pytest

from moonserve.conductor.events import Load, Placed, PlacementForgotten, Rejected, Tick, TtftObserved
from moonserve.conductor.placement.admission import STEP_SHARE, AdmissionMode
from moonserve.protocol.errors import InvalidRequest, NoWorker
from moonserve.protocol.request import RequestId, RequestPhase
from tests.conductor.cluster import Cluster, chain, shown

NEAR = pytest.approx


def with_slo(*, num_blocks: int = 1000, admission: AdmissionMode = AdmissionMode.PREDICTED, **limits: float) -> Cluster:
    """Returns a cluster in which a prompt of 100 tokens takes 1 s and 11 blocks, and a step 10 ms per sequence."""
    cluster = Cluster("p0", lease_s=1e6, admission=admission, **limits)
    cluster.decode("d0", num_blocks=num_blocks)
    return cluster


def test_a_queue_beyond_the_ttft_slo_rejects_until_the_first_instance_has_drained_enough() -> None:
    cluster = with_slo(ttft_slo_s=1.5)
    cluster.prefill("p1")
    cluster.place("r0", tokens=150)  # 1.5 s
    cluster.place("r1", tokens=120)  # 1.2 s
    for number in range(5):  # rejections leave nothing in the books
        rejected = cluster.reject(f"x{number}")
        assert (rejected.reason, rejected.predicted_ttft_s) == ("ttft_slo", NEAR(2.2))
        # r0 and r1 will have generated their 10 tokens of 10 ms when this prompt is prefilled.
        assert rejected.predicted_tbt_s < 0.02
        assert rejected.retry_after_s == NEAR(0.7)
    cluster.now += 0.71
    cluster.place("r2")


def test_request_may_set_its_own_slo_and_unreachable_one_is_reported() -> None:
    cluster = with_slo()
    assert cluster.reject("r0", ttft_slo_s=0.5).reason == "ttft_slo_unreachable"
    rejected = cluster.reject("r1", tbt_slo_s=0.001)
    assert rejected.reason == "tbt_slo_unreachable"
    assert rejected.retry_after_s > 0


def test_predicted_tbt_over_the_slo_rejects_until_sequences_end() -> None:
    """A third sequence of 10 ms exceeds the SLO until r0 (about 1 s to 17 s) or r1 (2 s to 6 s) has ended."""
    cluster = with_slo(tbt_slo_s=0.025)
    cluster.place("r0", max_tokens=1600)
    cluster.place("r1", max_tokens=200)
    rejected = cluster.reject("r2")
    assert (rejected.reason, rejected.predicted_tbt_s) == ("tbt_slo", NEAR(0.03))
    # Its prompt takes 1 s and r1 ends at 6 s, so it may return at 5 s, give or take the resolution of the outlook.
    assert 3.0 <= rejected.retry_after_s <= 6.0
    assert cluster.reject("r3", tbt_slo_s=0.015).retry_after_s > rejected.retry_after_s
    cluster.report("r1", RequestPhase.FINISHED, output_tokens=200)
    cluster.place("r2")


@pytest.mark.parametrize(("target", "reply"), [(0.041, Rejected), (0.043, Placed)])
def test_steps_leave_room_for_the_gap_in_which_a_request_joins(target: float, reply: type) -> None:
    """A step may take 95 % of the TBT target: steps of 40 ms, with four sequences, are too long for 41 ms."""
    assert 0.041 * STEP_SHARE < 0.040 < 0.043 * STEP_SHARE
    cluster = with_slo(tbt_slo_s=target)
    cluster.heartbeat("d0", Load(num_running=3, context_tokens=300, free_blocks=900))
    assert isinstance(cluster.ask("r0"), reply)


@pytest.mark.parametrize(("admission", "reply"), [(AdmissionMode.CURRENT, Placed), (AdmissionMode.PREDICTED, Rejected)])
def test_caution_leaves_room_for_requests_that_may_overtake(admission: AdmissionMode, reply: type) -> None:
    """Half of the prompts that took 1 s to land met four sequences more than predicted: mean 2, deviation 2. Next to
    one running sequence, a prompt fits by the mean (`current`), and not by mean plus deviation (`predicted`)."""
    cluster = with_slo(admission=admission)
    for _ in range(200):
        cluster.state._learned.overtaking.observe(1.0, 0.0)
        cluster.state._learned.overtaking.observe(1.0, 4.0)
    cluster.heartbeat("d0", Load(num_running=1, context_tokens=100, free_blocks=900))
    # 1 + 1 + 2 = 4 sequences of 10 ms; 6 with the deviation.
    assert isinstance(cluster.ask("r0", tbt_slo_s=0.05), reply)


# ---- the decode instance


@pytest.mark.parametrize(
    ("loads", "slots", "chosen"),
    [
        # The lowest predicted TBT wins. Placements that no heartbeat shows yet are counted.
        ((Load(num_running=2, free_blocks=1000), Load(free_blocks=1000)), (0, 0), "d1 d1 d0 d1 d0"),
        # Instances without free blocks are avoided.
        ((Load(free_blocks=5), Load(free_blocks=500, num_running=10)), (0, 0), "d1 d1"),
        # Placed prompts reserve blocks before a heartbeat shows them.
        ((Load(free_blocks=22), Load(free_blocks=11, num_running=9)), (0, 0), "d0 d0 d1"),
        # A free slot comes first.
        ((Load(free_blocks=1000, num_running=2), Load(free_blocks=1000, num_running=9)), (2, 99), "d1"),
    ],
)
def test_which_decode_instance_is_chosen(loads: tuple[Load, Load], slots: tuple[int, int], chosen: str) -> None:
    cluster = Cluster("p0")
    for number, load in enumerate(loads):
        cluster.decode(f"d{number}", max_num_seqs=slots[number])
        cluster.heartbeat(f"d{number}", load)
    names = chosen.split()
    assert [cluster.place(f"r{i}", max_tokens=2000).decode.instance_id for i in range(len(names))] == names


def test_a_heartbeat_that_counts_a_running_sequence_is_not_added_to_it() -> None:
    cluster = with_slo()
    cluster.place("r0", max_tokens=2000)
    cluster.now += 1.0
    cluster.report("r0", RequestPhase.FIRST_TOKEN)
    cluster.now += 1.0
    cluster.heartbeat("d0", Load(num_running=1, context_tokens=101, free_blocks=989))
    assert cluster.place("r1", max_tokens=2000).predicted_tbt_s == NEAR(0.02)
    cluster.report("r0", RequestPhase.FINISHED, output_tokens=2000)
    cluster.report("r1", RequestPhase.FAILED)
    assert cluster.place("r2").predicted_tbt_s == NEAR(0.01)


def test_leased_blocks_are_not_subtracted_twice() -> None:
    cluster = with_slo(num_blocks=22)
    cluster.place("r0")
    cluster.heartbeat("d0", Load(free_blocks=11, leased_blocks=11))
    cluster.place("r1")
    assert cluster.explain("r1").predicted_landing_wait_s == 0.0


def test_waiting_for_landing_blocks_counts_towards_ttft() -> None:
    cluster = with_slo(num_blocks=11)
    cluster.place("r0", max_tokens=200)  # begins at 1 s, ends at 3 s: 200 tokens of 10 ms
    assert cluster.place("r1").predicted_ttft_s == NEAR(3.0 + 1.0)
    assert cluster.reject("r2", ttft_slo_s=3.0).reason == "landing_blocks"


# ---- who can serve at all


def test_role_without_instance_raises_no_worker() -> None:
    cluster = Cluster()
    for join in (cluster.prefill, cluster.decode):
        assert isinstance(cluster.refuse("r0"), NoWorker)
        join(f"{join.__name__[0]}0")
    cluster.prefill("p1")
    for i in range(4):
        placement = cluster.place(f"r{i}", excluded_instances=frozenset({"p0"}))
        assert placement.prefill.instance_id == "p1"
    assert isinstance(cluster.refuse("x", excluded_instances=frozenset({"d0"})), NoWorker)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 4000},  # leaves no room for one generated token
        {"num_prompt_tokens": 15, "block_keys": chain("a", 2)},
        {"num_prompt_tokens": 3900},  # larger than every decode pool
    ],
)
def test_a_prompt_that_can_never_be_served_is_invalid(changes: dict[str, object]) -> None:
    cluster = with_slo(num_blocks=390)
    assert isinstance(cluster.refuse("r0", **changes), InvalidRequest)
    cluster.place("r1", tokens=3899)


# ---- the books


def test_the_running_prompt_is_worked_off_as_time_passes() -> None:
    cluster = with_slo()
    cluster.place("r0")
    cluster.place("r1")
    cluster.now += 0.4
    assert cluster.place("r2").predicted_ttft_s == NEAR(1.6 + 1.0)
    cluster.now += 10.0  # without a report only the running prompt is worked off
    assert cluster.place("r3").predicted_ttft_s == NEAR(2.0 + 1.0)
    cluster.report("r0", RequestPhase.FIRST_TOKEN)
    assert cluster.place("r4").predicted_ttft_s == NEAR(3.0 + 1.0)


def test_a_heartbeat_corrects_the_queue_both_ways() -> None:
    cluster = with_slo()
    cluster.place("r0")
    cluster.place("r1")
    cluster.heartbeat("p0", Load(queued_tokens=0))
    assert cluster.place("r2").predicted_ttft_s == NEAR(3.0), "it may not know them yet"
    cluster.now += 0.6
    cluster.heartbeat("p0", Load(queued_tokens=150))
    assert cluster.place("r3").predicted_ttft_s == NEAR(3.0), "one of three is done"
    cluster.now += 10.0
    cluster.heartbeat("p0", Load(queued_tokens=0))
    assert cluster.place("r4").predicted_ttft_s == NEAR(1.0)
    # An instance that has not looked up a waiting prompt yet reports all its tokens: here, those of r4.
    cluster.heartbeat("p0", Load(num_running=1, queued_tokens=900))
    assert cluster.place("r5").predicted_ttft_s == NEAR(1.0 + 1.0)
    cluster.heartbeat("p0", Load(num_running=1, num_waiting=2, queued_tokens=900))
    assert cluster.place("r6").predicted_ttft_s == NEAR(2.0 + 7.0 + 1.0), "others' work"


@pytest.mark.parametrize("end", [RequestPhase.FAILED, "placed again", "forgotten", "restarted"])
def test_load_of_a_placement_is_removed_once(end: object) -> None:
    cluster = with_slo()
    cluster.place("r0")
    if end == "forgotten":  # no report arrives
        cluster.now += 901.0
        assert cluster.send(Tick()) == [PlacementForgotten(request_id=RequestId("r0"))]
    elif end == "restarted":  # the worker restarts; a report about the old one leaves the new one's queue alone
        cluster.prefill("p0", epoch=2)
        cluster.place("r1")
        cluster.report("r0", RequestPhase.FAILED)
        assert cluster.place("r2").predicted_ttft_s == NEAR(2.0)
        return
    elif isinstance(end, RequestPhase):
        cluster.report("r0", end)
    assert cluster.place("r0").predicted_ttft_s == NEAR(1.0)


# ---- the record


def test_outcomes_are_compared_with_predictions_once() -> None:
    cluster = Cluster("p0", "d0")
    cluster.place("r0")
    observed = TtftObserved(request_id=RequestId("r0"), predicted_s=1.0, actual_s=1.25)
    assert cluster.report("r0", RequestPhase.FIRST_TOKEN, 1.25, prefill_s=1.0)[0] == observed
    assert observed not in cluster.report("r0", RequestPhase.FIRST_TOKEN, 1.25, prefill_s=1.0)
    cluster.report("r0", RequestPhase.FINISHED, 3.5, output_tokens=10)
    outcome = cluster.explain("r0").outcome
    assert (outcome.ttft_s, outcome.elapsed_s, outcome.output_tokens) == (1.25, 3.5, 10)
    assert outcome.prefill_s == 1.0, "the report of an end does not repeat it"


def test_output_lengths_are_learnt_from_finished_requests() -> None:
    """After an output of 20 tokens, r1 is expected to generate 20 and not 1,000, so it ends before r2 lands."""
    cluster = with_slo(tbt_slo_s=0.015)
    cluster.place("r0", max_tokens=1000)
    assert cluster.reject("r1", max_tokens=1000).reason == "tbt_slo"
    cluster.report("r0", RequestPhase.FINISHED, output_tokens=20)
    cluster.place("r1", max_tokens=1000)
    cluster.place("r2")
    decided = cluster.explain("r2")
    assert decided.expected_output == 10.0, "its own limit"
    assert decided.decode_candidates[0].landing_seqs == NEAR(1.0, abs=0.05)


def test_a_record_holds_all_candidates_and_the_reason_and_does_not_change_with_the_cluster() -> None:
    cluster = with_slo(ttft_slo_s=1.5)
    cluster.prefill("p1")
    for i in range(2):
        cluster.place(f"r{i}")
    reply = cluster.ask("r2", tenant="t")
    assert isinstance(reply, Rejected)
    record = shown(reply.decision)
    assert [c.instance_id for c in record.prefill_candidates] == ["p0", "p1"]
    first, decode = record.prefill_candidates[0], record.decode_candidates[0]
    assert (first.prefix_blocks, first.queue_s, first.prefill_s, first.ttft_s) == (0, 1.0, 1.0, 2.0)
    assert (decode.tbt_s, decode.fits, decode.needed_blocks) == (NEAR(0.01), True, 11)
    assert (record.admission, record.expected_output) == ("predicted", 10.0)
    assert (record.balancing_threshold, record.rejection.reason) == (2.0, "ttft_slo")
    cluster.heartbeat("d0", Load(free_blocks=7, num_running=3))
    cluster.report("r0", RequestPhase.CANCELLED)
    cluster.prefill("p9")
    assert cluster.explain("r2") == record


@pytest.mark.parametrize(
    ("bounds", "kept"), [({"num_decisions": 2}, [False, True, True]), ({"decision_bytes": 1}, [False, False, True])]
)
def test_only_the_newest_decisions_are_kept(bounds: dict[str, int], kept: list[bool]) -> None:
    cluster = Cluster("p0", "d0", **bounds)
    for i in range(3):
        cluster.place(f"r{i}", tokens=10)
    assert [cluster.state.explain(f"r{i}") is not None for i in range(3)] == kept
