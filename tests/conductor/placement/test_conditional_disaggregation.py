"""Tests of prefill on a decode worker: what is weighed, when it is chosen, what the books keep."""

import pytest

from moonserve.protocol.request import Placement, RequestPhase, Role
from moonserve.protocol.step_time import CHUNK_SHARE, DecodeProfile, PrefillProfile
from tests.conductor.cluster import Cluster, chain, worker

# 1 ms per token and steps of 20 ms. Half of the objective of 0.1 s leaves room for 30 tokens per step.
PREFILL = PrefillProfile(c0=0.0, c1=0.001, c2=0.0)
DECODE = DecodeProfile(c0=0.02, c1=0.0, c2=0.0)
NEAR = pytest.approx
ALONE_S = 0.01 + 2 * 0.02 + 0.06  # 60 tokens: half of the running step, then two steps with chunks


def busy(*, conditional: bool = True, reads: bool = True) -> Cluster:
    """Returns a cluster of a prefill worker with 2 s of work and two decode workers that may prefill."""
    cluster = Cluster(ttft_slo_s=30.0, tbt_slo_s=0.1, lease_s=30.0, conditional_disaggregation=conditional)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)):
        profiles = {"prefill_profile": PREFILL, "decode_profile": DECODE}
        cluster.join(worker(name, role, reads_prompts=reads and role is Role.DECODE, **profiles))
    assert not place(cluster, "long", 2_000).is_local_prefill
    return cluster


def place(cluster: Cluster, name: str, tokens: int = 60) -> Placement:
    return cluster.place(name, keys=chain(name, tokens // 10), tokens=tokens, max_tokens=100)


def test_short_prompts_behind_a_long_one_go_to_decode_workers_in_turn() -> None:
    """A prompt counts at its decode worker until its first token. The record has all candidates and their terms."""
    cluster = busy()
    first, second, third = (place(cluster, name) for name in "abc")
    assert first.is_local_prefill
    assert first.predicted_ttft_s == NEAR(ALONE_S)
    assert {first.decode.instance_id, second.decode.instance_id} == {"d", "e"}
    assert third.predicted_ttft_s == NEAR(ALONE_S + 2 * 0.02 + 0.06)
    record = cluster.explain("a")
    assert (record.is_undivided, record.prefill) == (True, "p")
    assert [row.instance_id for row in record.undivided_candidates] == ["d", "e"]
    row = record.undivided_candidates[0]
    assert (row.num_steps, row.ttft_s) == (2, NEAR(ALONE_S))
    assert row.step_s + row.added_s <= CHUNK_SHARE * 0.1 + 1e-9


@pytest.mark.parametrize(("late_s", "more_s"), [(0.0, 0.0), (0.05, 0.05)])
def test_reports_remove_the_load_and_update_the_overhead(late_s: float, more_s: float) -> None:
    cluster = busy()
    place(cluster, "a")
    cluster.now += 0.1 + late_s
    terms = {"queue_s": 0.0, "transfer_s": 0.0, "prefill_s": 0.1}
    cluster.report("a", RequestPhase.FIRST_TOKEN, 0.1 + late_s, output_tokens=1, **terms)
    again = place(cluster, "b")
    assert again.is_local_prefill
    assert again.predicted_ttft_s == NEAR(ALONE_S + more_s, rel=0.01)
    for name in ("a", "b", "long"):
        cluster.report(name, RequestPhase.FINISHED)


@pytest.mark.parametrize(("conditional", "reads"), [(False, True), (True, False)])
def test_local_prefill_needs_the_option_and_a_worker_that_can(conditional: bool, reads: bool) -> None:
    """A decode worker prefills only if the conductor's option allows it and its registration says that it can."""
    cluster = busy(conditional=conditional, reads=reads)
    assert not place(cluster, "short").is_local_prefill
    assert cluster.explain("short").undivided_candidates == []


def test_decode_worker_prefills_where_prefill_workers_miss_the_objective() -> None:
    """With 2 s of queue and 0.5 s allowed, a decode worker takes 60 tokens (0.11 s), but not 400 (14 steps, 0.69 s)."""
    cluster = busy()
    cluster.reject("late", num_prompt_tokens=400, ttft_slo_s=0.5)
    reply = cluster.ask("tight", num_prompt_tokens=60, ttft_slo_s=0.5)
    assert reply.placement.is_local_prefill  # type: ignore[union-attr]


def test_leaving_decode_worker_loses_its_prompts() -> None:
    cluster = busy()
    reader = place(cluster, "short").decode.instance_id
    cluster.decode(reader, epoch=2)
    cluster.report("short", RequestPhase.FAILED)
