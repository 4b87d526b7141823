"""Allocator: three policies over one space. Every block in one table, every request ends, promises are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.lookahead.allocator import Allocator
from engine.lookahead.base import Policy
from engine.lookahead.costs import Costs
from engine.lookahead.lookahead import Lookahead
from engine.lookahead.on_demand import OnDemand
from engine.lookahead.worst_case import WorstCase
from protocol.errors import InvalidRequest
from protocol.profile import DEFAULT_DECODE, DEFAULT_PREFILL
from tests.engine.lookahead.asking import Asking
from tests.thoroughness import examples

COSTS = Costs(decode=DEFAULT_DECODE, prefill=DEFAULT_PREFILL)
POLICIES: dict[str, Callable[[], Policy]] = {
    "on-demand": OnDemand,
    "vLLM's": lambda: OnDemand(per_holder=0),
    "worst case": WorstCase,
    "lookahead": Lookahead,
    "lookahead by cost": lambda: Lookahead(costs=COSTS),
}
each_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())


def taught(num_ended: int, output: int) -> Lookahead:
    """It has seen as many requests end after `output` tokens."""
    policy = Lookahead()
    for number in range(num_ended):
        ended = Asking(number, max_tokens=10_000, generated=output)
        policy.ended(ended, stopped=False)
    return policy


@each_policy
def test_a_table_has_room_for_what_is_there(make: Callable[[], Policy]) -> None:
    allocator = Allocator(100, 16, make())
    request = Asking(0, num_prompt_tokens=32)
    table = allocator.admit(request)
    assert table is not None
    assert len(table) >= 3
    assert allocator.has_room(request)


@each_policy
def test_a_request_that_can_never_fit_is_refused_by_name(make: Callable[[], Policy]) -> None:
    allocator = Allocator(4, 16, make())
    with pytest.raises(InvalidRequest, match="65 tokens does not fit into 4 blocks of 16"):
        allocator.admit(Asking(0, num_prompt_tokens=64))
    allocator.validate()


@each_policy
def test_alone_a_request_is_admitted_whatever_it_may_need(make: Callable[[], Policy]) -> None:
    """Nobody can end before it, so waiting would last for ever."""
    allocator = Allocator(4, 16, make())
    request = Asking(0, num_prompt_tokens=63, max_tokens=1000)
    assert allocator.admit(request) is not None


@each_policy
def test_what_outgrows_the_pool_is_said_to(make: Callable[[], Policy]) -> None:
    allocator = Allocator(4, 16, make())
    request = Asking(0, num_prompt_tokens=60, max_tokens=1000)
    allocator.admit(request)
    request.generated = 5
    with pytest.raises(InvalidRequest, match="65 tokens"):
        allocator.grow(request)


@each_policy
def test_one_request_has_one_table(make: Callable[[], Policy]) -> None:
    allocator = Allocator(100, 16, make())
    allocator.admit(Asking(0))
    with pytest.raises(ValueError, match="blocks already"):
        allocator.admit(Asking(0))


def test_on_demand_a_block_comes_when_it_is_needed_and_not_before() -> None:
    allocator = Allocator(100, 16, OnDemand())
    request = Asking(0, num_prompt_tokens=30)
    table = allocator.admit(request)
    assert table == [0, 1]
    request.generated = 2
    assert allocator.grow(request)
    assert table == [0, 1]
    request.generated = 3
    assert not allocator.has_room(request)
    assert allocator.grow(request)
    assert table == [0, 1, 2]
    assert allocator.counters.reallocations == 0


def test_a_table_that_cannot_go_on_behind_its_last_block_is_counted_as_reallocated() -> None:
    allocator = Allocator(100, 16, OnDemand())
    first, second = Asking(0, num_prompt_tokens=15), Asking(1, num_prompt_tokens=15)
    allocator.admit(first)
    allocator.admit(second)
    assert allocator.num_runs == 2
    first.generated = 2
    assert allocator.grow(first)
    assert allocator.holders[first.request_id].blocks == [0, 2]
    assert (allocator.counters.reallocations, allocator.num_runs) == (1, 3)


def test_on_demand_keeps_a_block_for_each_holder() -> None:
    """So that an admission does not make somebody give way at once."""
    strict, greedy = Allocator(4, 16, OnDemand()), Allocator(4, 16, OnDemand(per_holder=0))
    for allocator in (strict, greedy):
        allocator.admit(Asking(0, num_prompt_tokens=15))
    assert strict.admit(Asking(1, num_prompt_tokens=47)) is None
    assert greedy.admit(Asking(1, num_prompt_tokens=47)) is not None


def test_on_demand_may_keep_a_share_free() -> None:
    allocator = Allocator(100, 16, OnDemand(kept_free=0.1))
    allocator.admit(Asking(0, num_prompt_tokens=15))
    assert allocator.admit(Asking(1, num_prompt_tokens=90 * 16 - 1)) is None
    assert allocator.admit(Asking(2, num_prompt_tokens=89 * 16 - 1)) is not None


def test_on_demand_whoever_came_last_gives_way_and_the_cost_is_told() -> None:
    allocator = Allocator(8, 16, OnDemand(per_holder=0))
    old, young = Asking(0, num_prompt_tokens=63), Asking(1, num_prompt_tokens=63)
    allocator.admit(old)
    allocator.admit(young)
    old.generated = 2
    assert not allocator.grow(old)
    assert allocator.victim(old) == (young.request_id, 4, 64)
    allocator.preempt(young.request_id)
    assert allocator.grow(old)
    assert allocator.counters.preempted_tokens == 64


def test_the_worst_case_is_reserved_whole_and_never_grows() -> None:
    allocator = Allocator(100, 16, WorstCase())
    request = Asking(0, num_prompt_tokens=32, max_tokens=64)
    table = allocator.admit(request)
    assert table == [0, 1, 2, 3, 4, 5]
    request.generated = 64
    assert allocator.has_room(request)


def test_the_worst_case_of_two_must_fit_beside_each_other() -> None:
    allocator = Allocator(10, 16, WorstCase())
    assert allocator.admit(Asking(0, num_prompt_tokens=32, max_tokens=64)) is not None
    assert allocator.admit(Asking(1, num_prompt_tokens=32, max_tokens=64)) is None


def test_lookahead_without_knowledge_expects_the_worst() -> None:
    allocator = Allocator(20, 16, Lookahead())
    assert allocator.admit(Asking(0, num_prompt_tokens=32, max_tokens=128)) is not None
    assert allocator.admit(Asking(1, num_prompt_tokens=32, max_tokens=128)) is not None
    assert allocator.admit(Asking(2, num_prompt_tokens=32, max_tokens=128)) is None


def test_lookahead_admits_by_what_others_needed_and_not_by_what_they_might() -> None:
    allocator = Allocator(20, 16, taught(200, 16))
    admitted = [allocator.admit(Asking(1000 + n, 32, max_tokens=4096)) for n in range(8)]
    assert sum(table is not None for table in admitted) >= 4


def test_lookahead_never_expects_more_than_a_request_allows() -> None:
    allocator = Allocator(20, 16, taught(200, 5000))
    admitted = [allocator.admit(Asking(1000 + n, 31, max_tokens=17)) for n in range(8)]
    assert sum(table is not None for table in admitted) == 6  # 20 ÷ 3 blocks


def test_lookahead_takes_blocks_ahead_in_one_run() -> None:
    allocator = Allocator(100, 16, taught(200, 64))
    request = Asking(1000, num_prompt_tokens=31, max_tokens=4096)
    table = allocator.admit(request)
    assert table == [0, 1, 2, 3, 4, 5]  # 32 tokens and the 64 that are likely
    request.generated = 64
    assert allocator.has_room(request)


def test_blocks_ahead_are_taken_back_before_anybody_gives_way() -> None:
    allocator = Allocator(10, 16, taught(200, 64))
    first = Asking(1000, num_prompt_tokens=31, max_tokens=4096)
    table = allocator.admit(first)
    assert table is not None
    assert len(table) > 2
    needy = Asking(1001, num_prompt_tokens=31, max_tokens=33)
    assert allocator.admit(needy) is not None
    needy.num_prompt_tokens = 127  # as if it had grown by six blocks at once
    assert allocator.grow(needy)
    assert table == [0, 1]
    assert allocator.shortened == [first.request_id]
    assert allocator.counters.preemptions == 0
    allocator.validate()


def test_what_is_promised_is_not_taken_back() -> None:
    allocator = Allocator(10, 16, WorstCase())
    table = allocator.admit(Asking(0, num_prompt_tokens=31, max_tokens=128))
    assert table is not None
    assert allocator.admit(Asking(1, num_prompt_tokens=31)) is None
    assert len(table) == 10


def test_lookahead_s_victim_costs_least_and_is_never_the_first_in_rank() -> None:
    policy = taught(200, 16)
    allocator = Allocator(100, 16, policy)
    requests = [Asking(1000 + n, prompt, 17) for n, prompt in enumerate((31, 400, 79, 200))]
    for request in requests:
        assert allocator.admit(request) is not None
    # The third has the fewest tokens of those that free a block for each of the four.
    assert allocator.victim(requests[1]).request_id == requests[2].request_id
    requests[3].priority = 1
    assert allocator.victim(requests[1]).request_id == requests[3].request_id


def test_who_gave_way_once_is_spared_while_there_are_others() -> None:
    allocator = Allocator(100, 16, taught(200, 16))
    requests = [Asking(1000 + n, prompt, 17) for n, prompt in enumerate((31, 400, 79))]
    for request in requests:
        assert allocator.admit(request) is not None
    allocator.preempt(requests[2].request_id)
    assert allocator.admit(requests[2]) is not None
    assert allocator.victim(requests[0]).request_id == requests[1].request_id


def test_a_preemption_widens_the_margin_and_admissions_narrow_it_again() -> None:
    policy = Lookahead()
    allocator = Allocator(1000, 16, policy)
    before = policy.margin
    allocator.admit(Asking(0))
    allocator.preempt(Asking(0).request_id)
    assert policy.margin > before
    for number in range(100):
        policy.admitted(Asking(number))
    assert policy.margin == before


def test_a_dropped_request_teaches_nothing_and_leaves_nothing() -> None:
    policy = Lookahead()
    allocator = Allocator(100, 16, policy)
    allocator.admit(Asking(0))
    allocator.drop(Asking(0))
    allocator.drop(Asking(1))
    assert allocator.num_free == 100
    assert policy.predictor.curve(Asking(2)) is None
    allocator.validate()


class Serving(RuleBasedStateMachine):
    """A worker that follows the rules: who is preempted comes back first, and everybody ends."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Asking] = []
        self.running: list[Asking] = []
        self.tables: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.num_ended = self.num_asked = 0

    @initialize(name=st.sampled_from(sorted(POLICIES)), num_blocks=st.integers(8, 60))
    def begin(self, name: str, num_blocks: int) -> None:
        self.promises = name == "worst case"
        self.allocator = Allocator(num_blocks, 4, POLICIES[name]())

    @rule(
        prompt=st.integers(1, 20), output=st.integers(1, 11), slack=st.integers(0, 40),
        tenant=st.sampled_from(["", "a", "b"]), priority=st.integers(0, 1),
    )  # fmt: skip
    def ask(self, prompt: int, output: int, slack: int, tenant: str, priority: int) -> None:
        request = Asking(self.num_asked, prompt, output + slack, priority=priority, tenant=tenant)
        self.num_asked += 1
        self.ends[request.request_id] = output
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        request = self.waiting[0]
        nobody = not self.allocator.holders
        table = self.allocator.admit(request)
        assert table is not None or not nobody, "the only one is made to wait"
        if table is not None:
            del self.waiting[0]
            self.running.append(request)
            self.tables[request.request_id] = table

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        for request in sorted(self.running, key=lambda each: each.rank):
            while request in self.running and not self.allocator.grow(request):
                assert not self.promises, "a promise was broken"
                self.preempt(request)
        for request in list(self.running):
            assert self.allocator.has_room(request)
            if request.generated >= self.ends[request.request_id]:
                self.running.remove(request)
                self.allocator.finish(request, stopped=request.generated >= request.max_tokens)
                self.num_ended += 1
            else:
                request.generated += 1
        for request in self.running:
            assert (
                self.tables[request.request_id] is self.allocator.holders[request.request_id].blocks
            )

    def preempt(self, needy: Asking) -> None:
        best = min(self.running, key=lambda each: each.rank)
        victim = self.allocator.victim(needy)
        gone = next(each for each in self.running if each.request_id == victim.request_id)
        assert gone is not best or len(self.running) == 1, "the best-ranked gave way"
        assert victim.num_tokens == gone.num_tokens
        free = self.allocator.num_free
        self.allocator.preempt(gone.request_id)
        assert self.allocator.num_free == free + victim.num_blocks
        self.running.remove(gone)
        self.waiting.insert(0, gone)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.allocator.drop(request)
        self.num_ended += 1

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.validate()
        assert self.allocator.num_held + self.allocator.num_free == self.allocator.num_blocks
        assert self.allocator.holders.keys() == {each.request_id for each in self.running}

    def teardown(self) -> None:
        """Whoever waits is admitted and ends, however little room there is."""
        for _ in range(100 * self.num_asked):
            if not (self.waiting or self.running):
                break
            if self.waiting:
                self.admit()
            self.one_step()
        assert self.num_ended == self.num_asked
        if hasattr(self, "allocator"):
            assert self.allocator.num_free == self.allocator.num_blocks


Serving.TestCase.settings = settings(
    max_examples=examples(80), stateful_step_count=40, deadline=None
)
TestServing = Serving.TestCase
