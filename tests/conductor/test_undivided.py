"""Whether a decode worker had better read a prompt itself: what is weighed, when it is chosen, what the books keep."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conductor.events import Phase, Place, Placed, Rejected, Report
from conductor.limits import Limits
from conductor.policies import make_policy
from conductor.state import ConductorState
from protocol.ids import RequestId, Role
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.request import Placement
from protocol.step_budget import CHUNK_SHARE
from tests.conductor.cluster import chain, endpoint, worker

# 1 ms per token; a step of 20 ms under an objective of 0.1 s: half of it leaves 30 tokens per step.
PREFILL = PrefillProfile(c0=0.0, c1=0.001, c2=0.0)
DECODE = DecodeProfile(c0=0.02, c1=0.0, c2=0.0)


def conductor(*, conditional: bool = True, reads: bool = True) -> ConductorState:
    limits = Limits(tbt_slo_s=0.1, conditional=conditional)
    state = ConductorState(make_policy("global-cache-aware", 1.25), limits)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)):
        registration = worker(name, role)
        state.handle(
            replace(
                registration,
                prefill_profile=PREFILL,
                decode_profile=DECODE,
                reads_prompts=reads and role is Role.DECODE,
            ),
            0.0,
        )
    return state


def place(state: ConductorState, name: str, tokens: int, now: float = 1.0) -> Placement:
    keys = chain(name, tokens // 10)
    event = Place(
        request_id=RequestId(name), block_keys=keys, num_prompt_tokens=tokens, max_tokens=100
    )
    reply = state.handle(event, now)[-1]
    state.validate()
    assert isinstance(reply, Placed)
    return reply.placement


def first_token(name: str, elapsed_s: float) -> Report:
    """After 0.1 s of computing and no wait that anybody names."""
    return Report(
        request_id=RequestId(name), phase=Phase.FIRST_TOKEN, elapsed_s=elapsed_s, cached_tokens=0,
        output_tokens=1, queue_s=0.0, transfer_s=0.0, prefill_s=0.1,
    )  # fmt: skip


def test_a_short_prompt_behind_a_long_one_is_left_to_a_decode_worker() -> None:
    """The long one computes for 2 s; 60 tokens take two steps of 50 ms after half a step."""
    state = conductor()
    assert not place(state, "long", 2_000).is_undivided
    short = place(state, "short", 60)
    assert short.is_undivided
    assert short.predicted_ttft_s == pytest.approx(0.01 + 2 * 0.02 + 0.06)
    assert short.predicted_ttft_s < 2.0


def test_the_next_one_goes_where_nobody_is_read() -> None:
    """And a third one waits for one of them; each is counted until its first token."""
    state = conductor()
    place(state, "long", 2_000)
    first, second = place(state, "a", 60), place(state, "b", 60)
    assert {first.decode.instance_id, second.decode.instance_id} == {"d", "e"}
    third = place(state, "c", 60)
    assert third.predicted_ttft_s == pytest.approx(0.01 + 0.1 + 2 * 0.02 + 0.06)


def test_reports_take_out_what_the_placement_added() -> None:
    state = conductor()
    place(state, "long", 2_000)
    place(state, "a", 60)
    state.handle(first_token("a", elapsed_s=0.1), 1.1)
    state.validate()
    assert place(state, "b", 60, 1.1).predicted_ttft_s == pytest.approx(0.11)
    for name in ("a", "b", "long"):
        state.handle(Report(request_id=RequestId(name), phase=Phase.FINISHED, elapsed_s=1.0), 2.0)
        state.validate()


@pytest.mark.parametrize(("conditional", "reads"), [(False, True), (True, False)])
def test_only_who_is_allowed_and_able_to_reads(conditional: bool, reads: bool) -> None:
    """The option of the conductor, and what each decode worker registers."""
    state = conductor(conditional=conditional, reads=reads)
    place(state, "long", 2_000)
    assert not place(state, "short", 60).is_undivided
    decision = state.explain(RequestId("short"))
    assert decision is not None
    assert decision.undivided_columns is None


def test_an_objective_that_prefill_workers_miss_is_kept_by_a_decode_worker_or_not_at_all() -> None:
    """2 s of queue under 0.5 s: 60 tokens are there in 0.11 s, 400 tokens take 14 steps, 0.69 s."""
    state = conductor()
    place(state, "long", 2_000)
    tight = Place(
        request_id=RequestId("tight"),
        block_keys=(),
        num_prompt_tokens=60,
        max_tokens=9,
        ttft_slo_s=0.5,
    )
    assert isinstance(state.handle(tight, 1.0)[-1], Placed)
    late = replace(tight, request_id=RequestId("late"), num_prompt_tokens=400)
    assert isinstance(state.handle(late, 1.0)[-1], Rejected)
    state.validate()


def test_the_record_has_all_candidates_and_their_terms() -> None:
    state = conductor()
    place(state, "long", 2_000)
    place(state, "short", 60)
    decision = state.explain(RequestId("short"))
    assert decision is not None
    record = json.loads(decision.to_json())
    assert record["is_undivided"]
    assert record["prefill"] == "p"
    row = record["undivided_candidates"][0]
    assert {row["instance_id"], record["undivided_candidates"][1]["instance_id"]} == {"d", "e"}
    assert row["num_steps"] == 2
    assert row["step_s"] + row["added_s"] <= CHUNK_SHARE * 0.1 + 1e-9
    assert row["ttft_s"] == pytest.approx(0.11)


def test_a_decode_worker_that_leaves_takes_its_prompts_with_it() -> None:
    state = conductor()
    place(state, "long", 2_000)
    reader = place(state, "short", 60).decode.instance_id
    state.handle(replace(worker(reader, Role.DECODE), endpoint=endpoint(reader, epoch=2)), 1.5)
    state.validate()
    state.handle(Report(request_id=RequestId("short"), phase=Phase.FAILED, elapsed_s=1.0), 2.0)
    state.validate()


def test_what_every_request_pays_beside_its_terms_is_added_there_too() -> None:
    """A first token that took 50 ms more than its terms, all of them without a landing."""
    state = conductor()
    place(state, "long", 2_000)
    place(state, "a", 60)
    state.handle(first_token("a", elapsed_s=0.15), 1.15)
    again = place(state, "b", 60, 1.15)
    assert again.is_undivided
    assert again.predicted_ttft_s == pytest.approx(0.11 + 0.05, rel=0.01)
