"""Any interleaving of events at a decode worker gives right tokens and exactly one end per request."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.decode_worker.decisions.speculation import Speculation
from moonserve.engine.admission_policy import AdmissionPolicy, OnDemandPolicy
from moonserve.engine.kv_cache.paged_free_list import PagedFreeList
from moonserve.engine.lookahead_policy import LengthPredictor, LookaheadPolicy
from moonserve.protocol.errors import PeerError
from moonserve.protocol.request import GatewayId, LeaseId
from tests.decode_worker.driver import ALWAYS, CHEAP_STORE, Driver, foretelling, next_token, request_of
from tests.decode_worker.test_admission_and_preemption import asking
from tests.thoroughness import any_order

prompts = st.one_of(
    st.tuples(st.sampled_from([0, 50]), st.integers(1, 14)).map(lambda wish: [wish[0] + i for i in range(wish[1])]),
    st.builds(foretelling, st.integers(3, 14), wrong=st.integers(0, 20)),
)
wishes = st.fixed_dictionaries({"max_tokens": st.integers(2, 16), "priority": st.sampled_from([0, 0, 1])})


def gateway_of(name: str) -> str:
    return "even" if name[-1] in "02468" else "odd"


class DecodeWorker(RuleBasedStateMachine):
    """Decode worker with a tiny pool: requests often wait, are preempted or refused. Every event is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(
            num_blocks=self.num_blocks,
            policy=self.policy(),
            keeping=self.keeping,
            free_list=self.free_list,
            max_num_seqs=3,
            max_num_batched_tokens=5,
            max_model_len=26,
            runs_ahead=self.runs_ahead,
            speculation=self.speculation,
        )
        self.count = 0
        self.wishes: dict[str, list[int]] = {}  # request → prompt
        self.excused: set[str] = set()  # cancelled, or their gateway was lost

    num_blocks = 7
    free_list: PagedFreeList | None = None
    keeping: OffloadCosts | None = None
    runs_ahead = False
    speculation: Speculation | None = None

    def stops_after(self, name: str, max_tokens: int) -> int | None:
        """Returns the number of generated tokens after which a request stops; None for no stop token."""
        return None

    def policy(self) -> AdmissionPolicy:
        return OnDemandPolicy()

    def some(self, data: st.DataObject) -> str:
        """Draws one of the latest four requests. Older ones have mostly ended."""
        return data.draw(st.sampled_from(list(self.wishes)[-4:]))

    @rule(prompt=prompts, ttl_s=st.sampled_from([1.0, 4.0]), wait_s=st.sampled_from([0.5, 3.0]))
    def reserve(self, prompt: list[int], ttl_s: float, wait_s: float) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.wishes[name] = prompt
        self.driver.reserve(prompt, name, ttl_s=ttl_s, wait_s=wait_s)

    @rule(prompt=prompts, wishes=wishes, also_closed=st.booleans())
    def land(self, prompt: list[int], wishes: dict[str, int], also_closed: bool) -> None:
        """Reserves, commits and verifies one request. Without this rule, later states would rarely be reached."""
        self.reserve(prompt, ttl_s=4.0, wait_s=3.0)
        name = f"r{self.count}"
        if self.driver.grant_of(f"lease-{name}") is None:
            return
        self.commit_one(name, timeout_s=100.0, **wishes)
        self.driver.drain_landing(also_closed=also_closed)

    @precondition(lambda self: self.wishes)
    @rule(data=st.data())
    def reserve_again(self, data: st.DataObject) -> None:
        name = self.some(data)
        self.driver.reserve(self.wishes[name], name)

    @precondition(lambda self: self.wishes)
    @rule(data=st.data(), wishes=wishes, timeout_s=st.sampled_from([2.0, 100.0]))
    def commit(self, data: st.DataObject, wishes: dict[str, int], timeout_s: float) -> None:
        self.commit_one(self.some(data), timeout_s=timeout_s, **wishes)

    def commit_one(self, name: str, *, max_tokens: int, **wishes: float) -> None:
        stops_after = self.stops_after(name, max_tokens)
        gateway, prompt = gateway_of(name), self.wishes[name]
        self.driver.commit(
            request_of(prompt, name, gateway=gateway, max_tokens=max_tokens, stops_after=stops_after, **wishes)
        )

    @precondition(lambda self: self.driver.verifying)
    @rule(data=st.data(), bad=st.booleans())
    def verify(self, data: st.DataObject, bad: bool) -> None:
        blocks = self.driver.verifying[0].blocks
        corrupt = [data.draw(st.sampled_from([block.index for block in blocks]))] if bad else []
        self.driver.verify(corrupt)

    @precondition(lambda self: self.driver.closing)
    @rule()
    def close(self) -> None:
        self.driver.close()

    @precondition(lambda self: self.driver.step is not None)
    @rule(times=st.integers(1, 8))
    def compute(self, times: int) -> None:
        for _ in range(times):
            if self.driver.step is not None:
                self.driver.compute()

    @precondition(lambda self: self.driver.step is not None)
    @rule()
    def fail_step(self) -> None:
        self.driver.fail_step(PeerError("broken"))

    @precondition(lambda self: self.wishes)
    @rule(data=st.data(), kind=st.sampled_from(["renew", "release", "withdraw"]))
    def lease_call(self, data: st.DataObject, kind: str) -> None:
        lease_id = LeaseId(f"lease-{self.some(data)}")
        match kind:
            case "renew":
                self.driver.handle(events.LeaseRenewed(lease_id=lease_id, ttl_s=2.0))
            case "release":
                self.driver.handle(events.LeaseReleased(lease_id=lease_id))
            case _:
                self.driver.handle(events.ReserveWithdrawn(lease_id=lease_id))

    @precondition(lambda self: self.wishes)
    @rule(data=st.data(), ahead=st.booleans())
    def cancel(self, data: st.DataObject, ahead: bool) -> None:
        name = f"r{self.count + 1}" if ahead else self.some(data)
        self.excused.add(name)
        self.driver.cancel(name)

    @rule(gateway=st.sampled_from(["even", "odd"]))
    def lose_gateway(self, gateway: str) -> None:
        self.excused.update(name for name in self.wishes if gateway_of(name) == gateway)
        self.driver.handle(events.GatewayLost(gateway_id=GatewayId(gateway)))

    @rule(seconds=st.sampled_from([0.1, 0.7, 2.5]))
    def wait(self, seconds: float) -> None:
        self.driver.wait(seconds)

    @invariant()
    def something_progresses(self) -> None:
        """If sequences run, a step is in flight, or they wait for a landing or a move, which ends by itself."""
        state = self.driver.state
        if state.num_running and self.driver.step is None:
            assert state.num_leased_blocks or self.driver.closing or self.driver.moving

    @invariant()
    def tokens_are_right_and_come_once(self) -> None:
        for name, tokens in self.driver.tokens.items():
            prompt = len(self.wishes[name])
            assert [token.index for token in tokens] == list(range(1, len(tokens) + 1))
            for token in tokens:
                assert token.token_id == next_token(prompt + token.index)
            assert all(token.finish_reason is None for token in tokens[:-1])

    def teardown(self) -> None:
        self.driver.drain()
        for name in self.accepted():
            failures = len(self.driver.failures.get(name, ()))
            tokens = self.driver.tokens.get(name, ())
            finishes = sum(token.finish_reason is not None for token in tokens)
            if name in self.excused:
                assert failures + finishes <= 1
            else:
                assert failures + finishes == 1, f"{name} did not end exactly once"

    def accepted(self) -> set[str]:
        answers = self.driver.all_of(events.AnswerCommit)
        return {each.lease_id.removeprefix("lease-") for each in answers if not each.corrupt}


class ForeseeingDecodeWorker(DecodeWorker):
    """Decode worker that predicts short answers, and so admits more sequences than fit."""

    def policy(self) -> AdmissionPolicy:
        predictor = LengthPredictor()
        for number in range(20):
            answered = replace(asking(str(number), 6, max_tokens=100), num_tokens=5 + 2 + number % 3)
            predictor.ended(answered, hit_limit=False)
        return LookaheadPolicy(margin=0.0, predictor=predictor)


class KeepingDecodeWorker(ForeseeingDecodeWorker):
    """Decode worker that puts preempted sequences into a store, which may fail or lose objects."""

    keeping = CHEAP_STORE

    def __init__(self) -> None:
        super().__init__()
        self.driver.find_store()

    @rule()
    def find_store(self) -> None:
        self.driver.find_store()

    @precondition(lambda self: self.driver.moving)
    @rule(failed=st.sampled_from([False, False, False, True]))
    def move(self, failed: bool) -> None:
        self.driver.move(failed=failed)

    @precondition(lambda self: self.driver.memory.store)
    @rule(data=st.data())
    def lose_an_object(self, data: st.DataObject) -> None:
        store = self.driver.memory.store
        del store[data.draw(st.sampled_from(sorted(store)))]


class AheadDecodeWorker(KeepingDecodeWorker):
    """Decode worker that begins a step before the one before ends, in which a sequence may have stopped."""

    runs_ahead = True

    def stops_after(self, name: str, max_tokens: int) -> int | None:
        return max(2, max_tokens // 2) if name[-1] in "0369" else None


class DraftingDecodeWorker(AheadDecodeWorker):
    """Decode worker whose sequences draft and may stop within a draft. No step runs ahead, which would leave few."""

    runs_ahead = False
    speculation = ALWAYS


class AheadAndDraftingDecodeWorker(AheadDecodeWorker):
    """Decode worker that does both: no step follows one with a draft before it has ended."""

    speculation = ALWAYS


TestDecodeWorker = any_order(DecodeWorker, 75, derandomize=True)
TestForeseeingDecodeWorker = any_order(ForeseeingDecodeWorker, 75, derandomize=True)
TestKeepingDecodeWorker = any_order(KeepingDecodeWorker, 75, derandomize=True)
TestAheadDecodeWorker = any_order(AheadDecodeWorker, 75, derandomize=True)
TestDraftingDecodeWorker = any_order(DraftingDecodeWorker, 75, derandomize=True)
TestAheadAndDraftingDecodeWorker = any_order(AheadAndDraftingDecodeWorker, 75, derandomize=True)
