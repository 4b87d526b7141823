"""A step may begin before its prefix is there; what it computed counts only once the prefix is known to be good."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.state import PrefillState
from protocol.errors import PeerError, PeerLost
from protocol.ids import RequestId
from protocol.profile import PrefillProfile
from tests.prefill_worker.builders import (
    BLOCK_SIZE,
    HOME,
    granted,
    make_request,
    make_state,
    step_done,
    submitted,
)
from tests.prefill_worker.walks import assert_drained, kinds, only

NAME = RequestId("r")
LOST = PeerLost("gone")
NUM_TOKENS = 4 * BLOCK_SIZE + 3  # four blocks are stored
# A second for the three tokens that are left.
PROFILE = PrefillProfile(c0=0.1, c1=0.3, c2=0.0)


def early_state() -> PrefillState:
    return make_state(num_layers=4, layered_loads="always", home=None, budget=64, profile=PROFILE)


def load(
    state: PrefillState, name: str = NAME, *, num_cached: int = 0, first: int = 0
) -> act.LoadPrefix:
    """Submits a prompt whose four leading blocks lie in a store, and grants its landing."""
    request = make_request(name, range(first, first + NUM_TOKENS))
    actions = state.handle(submitted(request, sources=[(HOME, 0, 4)]), 0.0)
    state.handle(granted(only(actions, act.ReserveLanding), num_cached=num_cached), 0.0)
    return only(actions, act.LoadPrefix)


def progress(
    num_layers: int, *, seconds: float, name: str = NAME, num_blocks: int = 4
) -> ev.PrefixProgress:
    return ev.PrefixProgress(
        request_id=RequestId(name),
        num_blocks=num_blocks,
        num_layers=num_layers,
        layers_at_once=1,
        of_layers=4,
        seconds=seconds,
    )


def loaded(num_blocks: int = 4, name: str = NAME) -> ev.PrefixLoaded:
    return ev.PrefixLoaded(
        request_id=RequestId(name), checksums=tuple(range(2000, 2000 + num_blocks))
    )


def begin(state: PrefillState, *, num_cached: int = 0) -> act.RunStep:
    """The first step, which begins when the first layer is there."""
    load(state, num_cached=num_cached)
    return only(state.handle(progress(1, seconds=0.1), 0.1), act.RunStep)


def checked(state: PrefillState, event: ev.Event, now: float) -> list[act.Action]:
    actions = state.handle(event, now)
    state.validate()
    return actions


def test_a_step_begins_when_what_is_missing_arrives_before_it_is_needed() -> None:
    """Computing takes a second, so that three layers of four should come within three quarters of it."""
    state = early_state()
    load(state)
    assert not state.handle(progress(1, seconds=0.3), 0.3), "0.9 s to come"
    step = only(state.handle(progress(2, seconds=0.6), 0.6), act.RunStep)
    assert step.max_wait_s == pytest.approx(0.6 + 0.1)
    [plan] = step.plans
    assert (plan.slice.start, plan.slice.end) == (4 * BLOCK_SIZE, NUM_TOKENS)
    state.validate()


def test_nothing_counts_before_all_blocks_are_known_to_be_good() -> None:
    state = early_state()
    step = begin(state)
    assert not checked(state, step_done(step), 1.0)
    actions = checked(state, loaded(), 1.1)
    assert only(actions, act.SendFirstToken).token.token_id == 42
    sent = only(actions, act.SendBlocks)
    assert [target for _, target in sent.pairs] == [100, 101, 102, 103]
    checked(state, ev.WritesDone(request_id=NAME), 1.2)
    commit = only(checked(state, ev.WritesDone(request_id=NAME), 1.3), act.CommitHandoff)
    assert commit.checksums == (2000, 2001, 2002, 2003, 1004)
    checked(state, ev.HandoffAccepted(request_id=NAME), 1.4)
    assert_drained(state)
    assert state.counters["early_steps"] == 1


def test_a_prefix_that_is_good_before_the_step_ends_is_sent_at_once() -> None:
    state = early_state()
    step = begin(state, num_cached=1)
    sent = only(checked(state, loaded(), 0.5), act.SendBlocks)
    assert [target for _, target in sent.pairs] == [101, 102, 103]
    report = only(checked(state, step_done(step), 1.1), act.SendFirstToken).report
    assert report.cached_tokens == 4 * BLOCK_SIZE
    assert report.load_s == pytest.approx(0.1)
    assert report.compute_s == pytest.approx(1.0)


def test_what_the_engine_waited_counts_as_loading() -> None:
    state = early_state()
    step = begin(state)
    checked(state, loaded(), 0.5)
    done = ev.StepDone(slices=step_done(step).slices, waited_s=0.25)
    report = only(checked(state, done, 1.1), act.SendFirstToken).report
    assert report.load_s == pytest.approx(0.35)
    assert report.compute_s == pytest.approx(0.75)


@pytest.mark.parametrize("load_ends_first", [True, False])
@pytest.mark.parametrize("num_good", [0, 2])
def test_behind_a_bad_block_all_is_computed_again(load_ends_first: bool, num_good: int) -> None:
    """After the writes of the first attempt, which read the same blocks, have ended."""
    state = early_state()
    step = begin(state)
    ends: list[ev.Event] = [loaded(num_good), step_done(step, token_id=666)]
    for event in ends if load_ends_first else reversed(ends):
        assert not checked(state, event, 1.0)
    actions = checked(state, ev.WritesDone(request_id=NAME), 2.0)
    again = only(actions, act.RunStep)
    assert again.max_wait_s is None
    assert again.plans[0].slice.start == num_good * BLOCK_SIZE
    assert again.plans[0].send_from == num_good * BLOCK_SIZE
    assert len([a for a in actions if isinstance(a, act.SendBlocks)]) == bool(num_good)
    token = only(checked(state, step_done(again), 3.0), act.SendFirstToken).token
    assert token.token_id == 42
    assert state.counters["spoilt_early_steps"] == 1


def test_a_step_that_was_given_up_begins_again_when_all_is_there() -> None:
    state = early_state()
    begin(state)
    assert not checked(state, ev.StepGivenUp(), 1.0)
    assert not checked(state, progress(4, seconds=0.4), 1.0), "once is enough"
    assert not checked(state, loaded(), 2.0), "writes are under way"
    again = only(checked(state, ev.WritesDone(request_id=NAME), 2.0), act.RunStep)
    assert again.max_wait_s is None
    assert again.plans[0].slice.start == 4 * BLOCK_SIZE
    assert state.counters["given_up_early_steps"] == 1


def test_others_go_on_while_a_prefix_that_did_not_come_is_waited_for() -> None:
    state = early_state()
    begin(state)
    request = make_request("other", range(500, 506))
    reserve = only(state.handle(submitted(request), 0.2), act.ReserveLanding)
    assert not checked(state, granted(reserve), 0.3), "a step is under way"
    [plan] = only(checked(state, ev.StepGivenUp(), 1.0), act.RunStep).plans
    assert plan.slice.request_id == "other"


def test_nobody_shares_a_step_that_waits() -> None:
    """Neither prompts that are ready nor ones that load; the better rank goes first."""
    state = early_state()
    load(state)
    load(state, "later", first=500)
    actions = checked(state, progress(4, seconds=0.1, name="later"), 0.1)
    assert [p.slice.request_id for p in only(actions, act.RunStep).plans] == ["later"]
    checked(state, progress(4, seconds=0.1), 0.2)
    request = make_request("ready", range(900, 906))
    reserve = only(state.handle(submitted(request), 0.3), act.ReserveLanding)
    checked(state, granted(reserve), 0.3)
    step = step_done(act.RunStep(plans=only(actions, act.RunStep).plans))
    [plan] = only(checked(state, step, 0.4), act.RunStep).plans
    assert plan.slice.request_id == NAME


@pytest.mark.parametrize("error_first", [True, False])
def test_a_step_that_failed_behind_good_blocks_fails_its_request(error_first: bool) -> None:
    state = early_state()
    begin(state)
    ends: list[ev.Event] = [ev.StepFailed(error=PeerError("nan")), loaded()]
    actions = [a for e in (ends if error_first else ends[::-1]) for a in checked(state, e, 1.0)]
    assert act.Fail in kinds(actions)
    for _ in range(kinds(actions).count(act.SendBlocks) + 1):
        checked(state, ev.WritesDone(request_id=NAME), 2.0)
    assert_drained(state)


def test_a_step_that_failed_behind_a_bad_block_is_computed_again() -> None:
    state = early_state()
    begin(state)
    checked(state, ev.StepFailed(error=PeerError("nan")), 1.0)
    checked(state, ev.PrefixLoadFailed(request_id=NAME, error=LOST), 1.0)
    assert act.RunStep in kinds(checked(state, ev.WritesDone(request_id=NAME), 2.0))


@pytest.mark.parametrize("ends", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_cancelled_one_is_let_go_when_nothing_uses_its_blocks(ends: Sequence[int]) -> None:
    state = early_state()
    step = begin(state)
    checked(state, ev.CancelRequested(request_id=NAME), 0.5)
    events: list[ev.Event] = [step_done(step), loaded(), ev.WritesDone(request_id=NAME)]
    for position in ends:
        assert state.num_held_blocks
        checked(state, events[position], 1.0)
    assert_drained(state)


def test_a_store_that_has_fewer_blocks_means_computing_from_there() -> None:
    state = early_state()
    load(state)
    short = progress(4, seconds=0.1, num_blocks=2)
    step = only(checked(state, short, 0.1), act.RunStep)
    assert step.plans[0].slice.start == 2 * BLOCK_SIZE
    checked(state, step_done(step), 1.0)
    assert act.SendFirstToken in kinds(checked(state, loaded(2), 1.0))


def test_without_layers_told_it_waits_for_all() -> None:
    state = early_state()
    load(state)
    assert act.RunStep in kinds(checked(state, loaded(), 0.1))
    assert state.counters["early_steps"] == 0
