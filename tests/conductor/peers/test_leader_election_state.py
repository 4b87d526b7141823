"""Tests of leader election: at most one candidate leads, whatever happens to messages, clocks and processes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.conductor.peers.leader_election_state import (
    BeginLeading,
    Claim,
    Claimed,
    ClaimRefused,
    ClaimTerms,
    ElectionPhase,
    IllegalEvent,
    LeaderElectionState,
    Lost,
    RegistrySilent,
    Renew,
    Renewed,
    StepDown,
    Tick,
)
from moonserve.protocol.errors import StaleLease
from moonserve.protocol.membership.registry import Member
from moonserve.protocol.membership.registry.lease_table import LeaseTable
from moonserve.protocol.request import Endpoint
from tests.thoroughness import examples

TERMS = ClaimTerms(ttl_s=2.0)


def following() -> LeaderElectionState:
    """Returns a candidate whose first claim was refused at 0.0, because the leader's claim lasts until 0.2."""
    state = LeaderElectionState(TERMS)
    assert state.handle(Tick(), 0.0) == [Claim(known_epoch=0)]
    state.handle(ClaimRefused(retry_after_s=0.2, leader_address="a:1", epoch=4), 0.0)
    return state


def leading() -> LeaderElectionState:
    """Returns a candidate that leads with epoch 5 since 1.0."""
    state = following()
    assert state.handle(Tick(), 1.0) == [Claim(known_epoch=4)]
    assert state.handle(Claimed(epoch=5), 1.1) == [BeginLeading(epoch=5)]
    return state


def test_a_follower_names_the_leader_and_asks_again_when_its_claim_ends() -> None:
    state = following()
    assert state.leader_address == "a:1"
    assert 0.2 < state.due_at <= 0.5
    state.handle(Tick(), state.due_at)
    state.handle(ClaimRefused(retry_after_s=1.9, leader_address="a:1", epoch=4), 0.3)
    assert state.due_at == 0.3 + TERMS.renew_every_s
    state.validate()


def test_long_standby_claims_before_a_new_one() -> None:
    due = {}
    for name, first_refused_at in [("standby", 0.0), ("new", 4.5)]:
        state = LeaderElectionState(TERMS, due_at=first_refused_at)
        for now in (first_refused_at, 5.0):
            state.handle(Tick(), max(now, state.due_at))
            state.handle(ClaimRefused(retry_after_s=5.3 - now, leader_address="a:1", epoch=4), now)
            state.validate()
        due[name] = state.due_at
    assert 5.3 < due["standby"] < due["new"]


def test_renewal_extends_from_the_time_of_its_request() -> None:
    state = leading()
    assert state.handle(Tick(), 1.4) == []
    assert state.handle(Tick(), 1.5) == [Renew(epoch=5)]
    assert state.handle(Renewed(), 1.9) == []
    assert state.leads(1.5 + TERMS.held_s - 0.001)
    assert not state.leads(1.5 + TERMS.held_s)
    state.validate()


def test_claim_taken_over_by_another_ends_at_once() -> None:
    state = leading()
    state.handle(Tick(), 1.5)
    assert state.handle(Lost(reason="superseded"), 1.6) == [StepDown(epoch=5, reason="superseded")]
    assert not state.leads(1.6)
    state.validate()


def test_silent_registry_ends_a_claim_only_when_another_may_have_it() -> None:
    state = leading()
    now = state.due_at
    while now < 1.0 + TERMS.held_s:
        assert state.leads(now)
        assert state.handle(Tick(), now) == [Renew(epoch=5)]
        assert state.handle(RegistrySilent(reason="gone"), now) == []
        now = state.due_at
    [step_down, claim] = state.handle(Tick(), now)
    assert isinstance(step_down, StepDown)
    assert claim == Claim(known_epoch=5)
    state.validate()


def test_claim_granted_too_early_counts_only_after_any_other_has_ended() -> None:
    """An early grant counts only after a TTL: a registry that restarted empty has forgotten the holder's claim."""
    state = LeaderElectionState(TERMS)
    state.handle(Tick(), 0.0)
    state.handle(ClaimRefused(retry_after_s=1.9, leader_address="a:1", epoch=4), 0.0)
    state.handle(Tick(), 0.5)
    assert state.handle(Claimed(epoch=5), 0.5) == []
    now = 0.5
    while not state.leads(now):
        assert now < 0.5 + TERMS.ttl_s
        now = state.due_at
        if Renew(epoch=5) in state.handle(Tick(), now):
            state.handle(Renewed(), now)
        state.validate()
    assert now == 0.5 + TERMS.ttl_s


def test_unrequested_answer_is_refused_and_changes_nothing() -> None:
    state = leading()
    with pytest.raises(IllegalEvent, match="Renewed while leading, after following/Tick"):
        state.handle(Renewed(), 1.2)
    assert state.phase is ElectionPhase.LEADING
    assert state.leads(1.2)


_COMPOUND = {"talk": ("answer", "tick", "ask", "answer"), "turn": ("wait", "talk")}


class World:
    """A simulation of candidates and a registry, each with its own clock, and of messages that are delayed or lost."""

    def __init__(self, rates: list[float], registry_rate: float) -> None:
        self.now = 0.0
        self.rates, self.registry_rate = rates, registry_rate
        self.table = LeaseTable(first_epoch=1)
        self.states = [LeaderElectionState(TERMS, due_at=self.clock(i)) for i in range(len(rates))]
        self.asked: list[Claim | Renew | None] = [None] * len(rates)  # in flight to the registry
        self.answers: list[Claimed | ClaimRefused | Renewed | Lost | None] = [None] * len(rates)
        self.strays: list[tuple[int, Claim | Renew]] = []  # given up by their senders
        self.epochs_begun: list[int] = []

    def clock(self, number: int) -> float:
        return 1000.0 * number + self.rates[number] * self.now

    def member(self, number: int, epoch: int) -> Member:
        endpoint = Endpoint(instance_id="leader", epoch=epoch, rpc_address=f"c{number}:1", transfer_address="", host="")
        return Member(endpoint=endpoint, role="conductor", owner=f"c{number}")

    def step(self, verb: str, number: int) -> None:
        """Does a step. `verb`: tick, ask (request arrives), answer (reply arrives), drop (the sender gives up), stray
        (a dropped request arrives), talk (answer, tick, ask, answer), wait (until due), turn (wait, then talk)."""
        if verb in _COMPOUND:
            for each in _COMPOUND[verb]:
                self.step(each, number)
        elif verb == "wait":
            idle = self.states[number].due_at - self.clock(number)
            if idle < math.inf:
                self.now += max(0.0, idle) / self.rates[number] + 1e-6
        elif verb == "tick":
            self.deliver(number, Tick())
        elif verb == "ask" and (question := self.asked[number]) is not None:
            self.asked[number], self.answers[number] = None, self.decide(number, question)
        elif verb == "answer" and (answer := self.answers[number]) is not None:
            self.answers[number] = None
            self.deliver(number, answer)
        elif verb == "drop":
            self.drop(number)
        elif verb == "stray" and self.strays:
            self.decide(*self.strays.pop(0))

    def drop(self, number: int) -> None:
        question = self.asked[number]
        if question is None and self.answers[number] is None:
            return
        if question is not None:
            self.strays.append((number, question))
        self.asked[number] = self.answers[number] = None
        self.deliver(number, RegistrySilent(reason="dropped"))

    def decide(self, number: int, question: Claim | Renew) -> Claimed | ClaimRefused | Renewed | Lost:
        now = self.registry_rate * self.now
        try:
            if isinstance(question, Claim):
                member = self.member(number, question.known_epoch)
                joined = self.table.join(member, TERMS.ttl_s, now)
                return Claimed(epoch=joined.endpoint.epoch)
            self.table.renew("leader", question.epoch, TERMS.ttl_s, now)
            return Renewed()
        except StaleLease as error:
            if isinstance(question, Renew):
                return Lost(reason=error.message)
            return ClaimRefused(retry_after_s=error.retry_after_s or 0.0, leader_address=None, epoch=0)

    def deliver(self, number: int, event: Tick | Claimed | ClaimRefused | Renewed | Lost | RegistrySilent) -> None:
        for action in self.states[number].handle(event, self.clock(number)):
            if isinstance(action, Claim | Renew):
                assert self.asked[number] is None
                assert self.answers[number] is None
                self.asked[number] = action
            elif isinstance(action, BeginLeading):
                self.epochs_begun.append(action.epoch)

    def check(self) -> None:
        leaders = [i for i, state in enumerate(self.states) if state.leads(self.clock(i))]
        assert len(leaders) <= 1, f"{leaders} lead"
        assert self.epochs_begun == sorted(set(self.epochs_begun)), "an epoch did not grow"
        for number in leaders:
            [holder] = self.table.members(self.registry_rate * self.now)
            assert holder.owner == f"c{number}", "leads without the claim"
        for state in self.states:
            state.validate()
        self.table.validate()


RATES = st.floats(0.955, 1.045)  # any two rates differ by less than CLOCK_DRIFT
Steps = list[tuple[str, int, float]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "talk", "tick", "ask", "answer", "drop", "stray"]),
        st.sampled_from([0, 0, 1, 1, 2]),
        st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3, 1.7, 1.9, 2.02, 2.2]),
    ),
    min_size=20,
    max_size=100,
)


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(RATES, min_size=3, max_size=3), RATES, st.booleans(), STEPS)
def test_at_most_one_leads_epochs_grow_and_soon_after_any_events_one_leads(
    rates: list[float], registry_rate: float, warm: bool, steps: Steps
) -> None:
    """A candidate leads within three TTLs: a lost claim expires, and a claim granted too early is waited for."""
    world = World(rates, registry_rate)
    while warm and not world.states[0].leads(world.clock(0)):  # random histories seldom get this far
        world.step("turn", 0)
    for verb, number, pause_s in steps:
        world.step(verb, number)
        world.check()
        world.now += pause_s
        world.check()
    gives_up_at = world.now + 3 * TERMS.ttl_s
    while not any(state.leads(world.clock(i)) for i, state in enumerate(world.states)):
        assert world.now < gives_up_at
        for number in range(len(rates)):
            world.step("talk", number)
        world.check()
        world.now += 0.02
