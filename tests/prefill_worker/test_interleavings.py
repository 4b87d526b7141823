"""Any order of arrivals, answers, failures and cancellations keeps the state consistent and frees all blocks."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.state import PrefillState
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.request import GatewayId, RequestId, Token
from moonserve.worker.events import Action, Event
from tests.prefill_worker.builders import HOME, endpoint, granted, make_request, make_state, step_done, submitted
from tests.thoroughness import any_order

GATEWAYS = ("gateway-0", "gateway-1")
LOST = PeerLost("gone")

Answer = Callable[[str], Event]
"""Returns the event that ends an operation: "good" for success, "odd" for an anomaly, "bad" for failure."""


@dataclass
class Load:
    """A prefix that is being loaded."""

    num_blocks: int
    num_layers: int = 0  # arrived
    is_good: bool = False  # set at the end of the load


class PrefillWorkers(RuleBasedStateMachine):
    """Simulates the environment of one worker. Each action waits in `under_way` until a rule answers it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_requests = 0
        self.live: set[str] = set()  # without a last token, a failure or a handoff
        self.gateway_of: dict[str, str] = {}
        self.first_tokens: dict[str, Token] = {}
        self.under_way: list[tuple[str, Answer]] = []
        self.steps: list[int] = []
        self.sent_late: set[int] = set()  # of these steps, whose landing was granted while they ran
        self.sent: defaultdict[str, set[int]] = defaultdict(set)  # tokens by lease
        self.reserving: dict[str, ev.ReserveLanding] = {}
        self.loading: dict[str, Load] = {}  # layered loads in flight
        self.early: dict[int, Load] = {}  # by sampled token: the load behind which its step ran
        self.state: PrefillState = make_state()

    @initialize(
        limits=st.fixed_dictionaries(
            {
                "num_blocks": st.integers(2, 12),
                "budget": st.integers(1, 12),
                "policy": st.sampled_from(["fcfs", "priority"]),
                "max_prefetch_blocks": st.integers(0, 6),
                "layered_loads": st.sampled_from(["always", "never"]),
                "num_stages": st.sampled_from([1, 1, 1, 2, 3]),
                "computes_before_grant": st.booleans(),
            }
        ),
        puts=st.integers(1, 4),
    )
    def start(self, limits: dict[str, Any], puts: int) -> None:
        limits["computes_before_grant"] &= limits["num_stages"] == 1
        self.state = make_state(
            max_put_blocks=puts, max_pending_puts=2 * puts, max_model_len=40, num_layers=3, **limits
        )

    def post(self, event: Event) -> None:
        for action in self.state.handle(event, self.now):
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case ev.ReserveLanding():
                self.reserving[action.request_id] = action
                self.wait(action.request_id, self.answer_reserve(action))
            case ev.LoadPrefix():
                self.wait(action.request_id, self.answer_load(action))
            case ev.SendBlocks():
                self.sent[action.landing.lease_id].update(
                    4 * block % 400 + i for _, block in action.pairs for i in range(4)
                )
                self.wait(action.request_id, self.answer_writes(action.request_id))
            case ev.RunStep():
                self.check_step(action)
                self.wait("step", self.answer_step(action))
            case ev.SendStep():
                [plan] = self.last_plans  # otherwise it is not clear which slice is sent
                self.sent_late.update(self.steps)
                self.sent[action.landing.lease_id].update(range(action.send_from, plan.slice.end))
            case ev.CommitHandoff():
                tokens = range(4 * action.num_cached_blocks, len(action.request.token_ids))
                assert self.sent[action.lease_id].issuperset(tokens), "some KV was not sent"
                self.wait(action.request.request_id, self.answer_commit(action))
            case ev.PutBlocks():
                self.wait("put", self.answer_put(action))
            case ev.SendFirstToken():
                name = action.token.request_id
                assert name in self.live, "a token after the end"
                assert name not in self.first_tokens, "a second first token"
                behind = self.early.get(action.token.token_id)
                assert behind is None or behind.is_good, "computed from what was not verified"
                self.first_tokens[name] = action.token
                if action.token.finish_reason:
                    self.live.remove(name)
            case ev.Fail():
                assert action.request_id in self.live, "a failure after the end"
                self.live.remove(action.request_id)
            case ev.WithdrawReservation() | ev.ReleaseLanding() | ev.PrefetchPrefix() | ev.SkipPrefix():
                pass

    def wait(self, name: str, answer: Answer) -> None:
        self.under_way.append((name, answer))

    def check_step(self, step: ev.RunStep) -> None:
        plans, limits = step.plans, self.state._shared.limits
        assert sum(p.slice.num_tokens for p in plans) <= limits.max_num_batched_tokens
        assert len({p.slice.request_id for p in plans}) == len(plans)
        self.steps.append(step.step_id)
        self.last_plans = plans
        for plan in plans:
            if plan.landing is not None:
                self.sent[plan.landing.lease_id].update(range(plan.send_from, plan.slice.end))
        assert len(self.steps) <= limits.num_stages
        assert len(set(self.steps)) == len(self.steps), "two steps have one name"

    # -- answers

    def answer_reserve(self, action: ev.ReserveLanding) -> Answer:
        refused = ev.LandingRefused(request_id=action.request_id, error=LOST)
        num_full = action.num_tokens // 4
        return lambda how: granted(action, num_cached=num_full if how == "odd" else 0) if how != "bad" else refused

    def answer_load(self, action: ev.LoadPrefix) -> Answer:
        num_keys = sum(len(part.keys) for part in action.parts)
        load = Load(num_blocks=num_keys)
        if action.choice.layers_at_once is not None:
            assert action.choice.layers_at_once == 1
            self.loading[action.request_id] = load

        def reads(*, seconds: float, failed: bool = False) -> tuple[ev.PartRead, ...]:
            store = action.parts[0].store
            return (ev.PartRead(store=store, num_bytes=1000, seconds=seconds, failed=failed),)

        def answer(how: str) -> Event:
            self.loading.pop(action.request_id, None)
            load.is_good = how == "good"
            if how == "bad":
                slow = reads(seconds=5.0, failed=True)
                return ev.PrefixLoadFailed(request_id=action.request_id, error=LOST, reads=slow)
            num_good = load.num_blocks if how == "good" else load.num_blocks - 1
            return ev.PrefixLoaded(
                request_id=action.request_id,
                checksums=tuple(range(2000, 2000 + num_good)),
                reads=reads(seconds=0.01 if how == "good" else 1.0),
            )

        return answer

    def answer_writes(self, name: RequestId) -> Answer:
        return lambda how: (
            ev.WritesFailed(request_id=name, error=LOST) if how == "bad" else ev.WritesDone(request_id=name)
        )

    def answer_step(self, action: ev.RunStep) -> Answer:
        behind: Load | None = None
        if action.max_wait_s is not None:
            assert len(action.plans) == 1, "others wait for this one's prefix"
            behind = self.loading[action.plans[0].slice.request_id]
            assert behind.num_layers > 0

        def answer(how: str) -> Event:
            for plan in action.plans:
                if plan.landing is not None or action.step_id in self.sent_late:
                    name = plan.slice.request_id
                    self.wait(name, self.answer_writes(name))
            self.steps.remove(action.step_id)
            self.sent_late.discard(action.step_id)
            if how == "bad":
                return ev.StepFailed(error=LOST, step_id=action.step_id)
            if behind is not None:
                if how == "odd":
                    return ev.StepGivenUp()
                token = 1000 + len(self.early)
                self.early[token] = behind
                return step_done(action, token_id=token)
            return step_done(action, token_id=42 if how == "good" else 43)

        return answer

    def answer_commit(self, action: ev.CommitHandoff) -> Answer:
        name = action.request.request_id

        def answer(how: str) -> Event:
            if how == "bad":
                return ev.HandoffFailed(request_id=name, error=LOST)
            num_blocks = -(-len(action.request.token_ids) // 4)
            if how == "odd" and action.checksums:
                first_sent = num_blocks - len(action.checksums)
                return ev.HandoffCorrupt(request_id=name, indexes=(first_sent,))
            if self.state._shared.sequences[name].phase == "committing":
                self.live.remove(name)
            return ev.HandoffAccepted(request_id=name)

        return answer

    def answer_put(self, action: ev.PutBlocks) -> Answer:
        def answer(how: str) -> Event:
            if how == "bad":
                return ev.PutFailed(put_id=action.put_id, error=LOST)
            corrupt = (action.items[0].key,) if how == "odd" else ()
            return ev.PutDone(put_id=action.put_id, num_refused=0, corrupt=corrupt)

        return answer

    # -- rules

    def send(
        self, tokens: Iterable[int], *, sources: Any = (), rank: float = 0.0, gateway: str = GATEWAYS[0], **wishes: Any
    ) -> str:
        """Submits a new request and returns its name."""
        name = f"r{self.num_requests}"
        self.gateway_of[name] = gateway
        self.live.add(name)
        self.post(submitted(make_request(name, [*tokens], gateway=gateway, **wishes), sources=sources, rank=rank))
        return name

    @rule(
        shared=st.integers(0, 20),
        own=st.integers(1, 24),
        sources=st.integers(0, 4),
        rank=st.sampled_from([0.0, 0.0, -3.0, 3.0, 100.0]),
        wishes=st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 3),
                "gateway": st.sampled_from(GATEWAYS),
                "priority": st.integers(-1, 1),
                "timeout_s": st.sampled_from([5.0, 600.0]),
            }
        ),
    )
    def submit(self, shared: int, own: int, sources: int, rank: float, wishes: dict[str, Any]) -> None:
        self.num_requests += 1
        tokens = [*range(shared), *(1000 * self.num_requests + i for i in range(own))]
        placed = [(HOME, 0, sources), (endpoint("store-1"), sources, 2)] if sources else []
        self.send(tokens, sources=placed, rank=rank, stop_token_ids=frozenset({43}), **wishes)

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data(), own=st.integers(1, 24))
    def come_back(self, data: st.DataObject, own: int) -> None:
        """Submits a request that has ended again, under its old id."""
        name = f"r{data.draw(st.integers(1, self.num_requests))}"
        if name not in self.live:
            self.live.add(name)
            self.first_tokens.pop(name, None)
            gateway = self.gateway_of[name]
            self.post(submitted(make_request(name, range(own), gateway=gateway)))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), how=st.sampled_from(["good", "good", "odd", "bad"]))
    def answer(self, data: st.DataObject, how: str) -> None:
        position = data.draw(st.integers(0, len(self.under_way) - 1))
        name, answer = self.under_way[position]
        if name == "step" and any(other == "step" for other, _ in self.under_way[:position]):
            how = "bad"  # a pipeline's steps complete in order, but a later one may fail at an earlier stage
        del self.under_way[position]
        self.post(answer(how))

    @rule(own=st.integers(1, 12), stored=st.integers(1, 5), max_tokens=st.integers(1, 3))
    def submit_stored(self, own: int, stored: int, max_tokens: int) -> None:
        """Submits a prompt that can start as soon as one layer of its prefix has arrived."""
        self.num_requests += 1
        first = 1000 * self.num_requests
        tokens = range(first, first + 4 * stored + own)
        name = self.send(tokens, sources=[(HOME, 0, stored)], max_tokens=max_tokens)
        for position, (other, answer) in enumerate(self.under_way):
            if other == name and name in self.reserving:
                del self.under_way[position]
                self.post(answer("good"))
                break

    @precondition(lambda self: any(load.num_layers < 3 for load in self.loading.values()))
    @rule(data=st.data(), fewer=st.booleans())
    def layers_arrive(self, data: st.DataObject, fewer: bool) -> None:
        names = sorted(name for name, load in self.loading.items() if load.num_layers < 3)
        name = data.draw(st.sampled_from(names))
        load = self.loading[name]
        if fewer and load.num_layers == 0 and load.num_blocks > 1:
            load.num_blocks -= 1
        load.num_layers += 1
        self.post(
            ev.PrefixProgress(
                request_id=RequestId(name),
                num_blocks=load.num_blocks,
                num_layers=load.num_layers,
                layers_at_once=1,
                of_layers=3,
                seconds=0.001 * load.num_layers,
            )
        )

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.num_requests))
        self.post(ev.RequestCancelled(request_id=RequestId(f"r{number}")))

    @rule(gateway=st.sampled_from(GATEWAYS))
    def lose_gateway(self, gateway: str) -> None:
        self.live -= {name for name in self.live if self.gateway_of[name] == gateway}
        self.post(ev.GatewayLost(gateway_id=GatewayId(gateway)))

    @rule(seconds=st.floats(0.1, 4.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.post(ev.Tick())

    @rule(epoch=st.integers(1, 2))
    def find_home(self, epoch: int) -> None:
        self.post(ev.StoreFound(store=endpoint("store-0", epoch=epoch)))

    @invariant()
    def books_are_kept(self) -> None:
        self.state.validate()

    def teardown(self) -> None:
        """Ends all operations. Then every request has ended and every block is free."""
        while self.under_way:
            _, answer = self.under_way.pop(0)
            self.post(answer("good"))
            self.state.validate()
        assert self.state.is_idle
        assert self.state.num_held_blocks == 0
        assert not self.live, "some request ended silently"


TestPrefillWorkers = any_order(PrefillWorkers, 30, derandomize=True)
