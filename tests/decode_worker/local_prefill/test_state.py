"""Tests of a decode worker that also prefills: budgeted chunks, prefix loads, puts to stores, no lost request."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.events import SendTokens, StoreFound
from moonserve.decode_worker.local_prefill.publishing import BlockPublisher, PutEnded, SealBlocks, Sealed
from moonserve.decode_worker.local_prefill.state import LocalPrefillState
from moonserve.engine.model.batch import MAX_SCORED_TOKENS
from moonserve.prefill_worker.decisions import events as ev
from moonserve.protocol.errors import DeadlineExceeded, InvalidRequest, NoWorker, PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import Endpoint, GatewayId, Placement, PrefillReport, PrefixSource
from moonserve.protocol.step_time import MIN_CHUNK_TOKENS, DecodeProfile, PrefillProfile, StepBudget
from moonserve.worker.events import Submitted
from tests.decode_worker.driver import BLOCK_SIZE, Driver, keys_of, limits, request_of
from tests.engine.kv_cache.shapes import quiet_pool
from tests.scores import is_whole
from tests.thoroughness import any_order

STORE = Endpoint(instance_id="store", epoch=1, rpc_address="s:1", transfer_address="s:2", host="host")
# A decode step takes 4 ms plus 1 ms per sequence; each prompt token adds 1 ms.
DECODE, PREFILL = DecodeProfile(c0=0.004, c1=0.001, c2=0.0), PrefillProfile(c0=0.0, c1=0.001, c2=0.0)
BUDGET = StepBudget(decode=DECODE, prefill=PREFILL, max_step_s=0.025)


class LocalPrefillDriver(Driver):
    """Driver whose worker also accepts submitted prompts; landings work as in `Driver`."""

    def __init__(self, num_blocks: int = 16, budget: StepBudget | None = BUDGET, **changes: int) -> None:
        super().__init__(num_blocks, **changes)
        self.pool = quiet_pool(num_blocks, on_removed=lambda key: self.publishing.on_evicted(key))
        self.publishing = BlockPublisher(self.pool, max_in_flight=2, max_pending=4)
        self.state = LocalPrefillState(self.pool, replace(limits(**changes), budget=budget), self.publishing)
        self.loads: list[ev.LoadPrefix] = []
        self.seals: list[SealBlocks] = []
        self.puts: list[ev.PutBlocks] = []
        self.stored: dict[BlockKey, int] = {}  # checksums by key
        self._contents: dict[BlockKey, Sequence[int]] = {}  # tokens of every block of a submitted prompt
        self.reports: dict[str, PrefillReport] = {}
        self._scored: dict[str, int] = {}  # prompt length by request, if its latest submission requests prompt scores

    def handle(self, event: Any) -> list[Any]:
        done: list[Any] = super().handle(event)
        for token in (token for action in done if isinstance(action, SendTokens) for token in action.tokens):
            report = self.state.report(token.request_id, self.now)
            if report is not None:
                assert token.index == 0, "a report comes with the first token"
                self.reports[token.request_id] = report
                if (num_tokens := self._scored.get(report.request_id)) is None:
                    assert report.prompt_logprobs is None
                else:
                    assert is_whole(report.prompt_logprobs, num_tokens)
                    assert report.cached_tokens == 0
        return done

    def _perform(self, action: Any) -> None:
        match action:
            case ev.LoadPrefix():
                assert all(self.pool.references_of(block) == 1 for part in action.parts for block in part.blocks)
                self.loads.append(action)
            case SealBlocks():
                assert all(self.pool.references_of(block) for block in action.blocks)
                self.seals.append(action)
            case ev.PutBlocks():
                self.puts.append(action)
            case _:
                super()._perform(action)

    # -- events from outside the worker

    def submit(self, prompt: Sequence[int], request_id: str = "r", *, num_stored: int = 0, **wishes: Any) -> list[Any]:
        """Submits a prompt. `num_stored`: number of leading blocks that the store holds."""
        for index, key in enumerate(keys_of(prompt)):
            self._contents[key] = prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        request = replace(request_of(prompt, request_id, **wishes), token_ids=tuple(prompt))
        self._scored.pop(request_id, None)
        if request.scores_prompt:
            self._scored[request_id] = len(prompt)
        sources = (PrefixSource(store=STORE, first_block=0, num_blocks=num_stored),) if num_stored else ()
        placement = Placement(request_id=request.request_id, prefill=STORE, decode=STORE, prefix_sources=sources)
        return self.handle(Submitted(request=request, placement=placement))

    def load(self, num_good: int | None = None) -> list[Any]:
        """Ends the oldest load with `num_good` valid blocks; None: all. A block's checksum is its key's first byte."""
        action = self.loads.pop(0)
        keys = [key for part in action.parts for key in part.keys][:num_good]
        blocks = [block for part in action.parts for block in part.blocks]
        for key, block in zip(keys, blocks, strict=False):
            self.memory.fill(block, self._contents[key])
        return self.handle(ev.PrefixLoaded(request_id=action.request_id, checksums=tuple(key[0] for key in keys)))

    def fail_load(self) -> list[Any]:
        action = self.loads.pop(0)
        return self.handle(ev.PrefixLoadFailed(request_id=action.request_id, error=PeerLost("gone")))

    def seal(self) -> list[Any]:
        action = self.seals.pop(0)
        return self.handle(Sealed(seal_id=action.seal_id, checksums=tuple(action.blocks)))

    def put(self, *, fails: bool = False) -> list[Any]:
        action = self.puts.pop(0)
        outcome: ev.PutDone | ev.PutFailed = ev.PutDone(put_id=action.put_id, num_refused=0, corrupt=())
        if fails:
            outcome = ev.PutFailed(put_id=action.put_id, error=PeerLost("gone"))
        else:
            self.stored.update((item.key, item.checksum) for item in action.items)
        return self.handle(PutEnded(store_id=action.store.instance_id, outcome=outcome))

    def find_home(self) -> list[Any]:
        return self.handle(StoreFound(store=STORE))

    def settle(self) -> None:
        """Completes all pending loads, seals and puts."""
        while self.loads or self.seals or self.puts:
            if self.loads:
                self.load()
            elif self.seals:
                self.seal()
            else:
                self.put()

    def advance(self) -> bool:
        self.settle()
        return super().advance()

    @property
    def step_s(self) -> float:
        """Duration of the running step by the budget's formulae: 1 ms per sequence and per token of a chunk."""
        counts = [piece.num_tokens for piece in self.step.slices]
        return 0.004 * (1 in counts) + 0.001 * sum(counts)


def test_prompt_is_computed_in_chunks_within_the_step_budget() -> None:
    """A step of 25 ms holds a chunk of 25 tokens alone, or of 20 tokens next to one decoding sequence."""
    driver = LocalPrefillDriver(64, max_num_batched_tokens=100, max_model_len=200)
    driver.start(range(8), "a")
    driver.submit(range(100, 160), "b")
    driver.compute()
    assert driver.step_of() == [("a", 9, 10), ("b", 0, 20)]
    for _ in range(3):
        driver.compute()
    assert [token.index for token in driver.tokens["b"]] == [0]
    assert driver.step_of() == [("a", 12, 13), ("b", 60, 61)]
    assert driver.state.counters.prompt_tokens == 60
    assert driver.reports["b"].cached_tokens == 0


def test_chunks_shrink_where_steps_take_longer_than_the_profiles_say() -> None:
    """On a shared host where steps take twice the profiled time, half of the tokens fit into the budget."""
    driver = LocalPrefillDriver(64, max_num_batched_tokens=200, max_model_len=400)
    driver.start(range(8), "a")
    for _ in range(100):
        driver.now += 2 * driver.step_s
        driver.compute()
    driver.submit(range(1_000, 1_100), "b")
    driver.now += 2 * driver.step_s
    driver.compute()
    chunk = driver.step_of()[1][2]
    assert MIN_CHUNK_TOKENS <= chunk <= 17
    assert 2 * driver.step_s <= max(BUDGET.max_step_s, 2 * (0.005 + 0.001 * MIN_CHUNK_TOKENS)) + 0.002


def test_a_prefix_is_read_from_the_store_and_the_rest_computed_and_put_there() -> None:
    """With one of a prompt's three complete blocks stored, that block is loaded; the other two are computed and put."""
    driver = LocalPrefillDriver(16)
    prompt = list(range(14))
    driver.submit(prompt, "a", num_stored=1)
    assert driver.step is None
    driver.load()
    assert driver.step_of() == [("a", 4, 14)]
    driver.compute()
    assert driver.reports["a"].cached_tokens == 4
    driver.settle()
    assert list(driver.stored) == list(keys_of(prompt)[1:])
    assert len(driver.pool.match_prefix(keys_of(prompt))) == 3


def test_missing_prefix_is_computed() -> None:
    driver = LocalPrefillDriver(16)
    driver.submit(range(14), "a", num_stored=3)
    driver.load(num_good=1)
    assert driver.step_of() == [("a", 4, 14)]
    driver.submit(range(100, 114), "b", num_stored=3)
    driver.fail_load()
    driver.compute()
    assert ("b", 0, 14) in driver.step_of()


def test_second_prompt_reuses_the_first_ones_blocks() -> None:
    driver = LocalPrefillDriver(16)
    driver.submit(range(14), "a", max_tokens=2)
    driver.compute()
    driver.settle()
    driver.submit([*range(14), 50], "b", num_stored=2)
    assert not driver.loads, "the device has more than the store"
    driver.compute()
    assert ("b", 12, 15) in driver.step_of()


def test_new_blocks_of_a_prompt_that_nobody_stored_go_to_the_home_store() -> None:
    driver = LocalPrefillDriver(16)
    driver.submit(range(8), "a")
    driver.compute()
    driver.settle()
    assert not driver.stored
    driver.find_home()
    driver.submit(range(100, 108), "b")
    driver.compute()
    driver.compute()
    driver.settle()
    assert list(driver.stored) == list(keys_of(range(100, 108)))


def test_cancelling_while_a_prefix_is_read_frees_the_blocks_when_nobody_writes_them() -> None:
    driver = LocalPrefillDriver(16)
    driver.submit(range(14), "a", num_stored=2)
    driver.cancel("a")
    assert driver.pool.num_free == 12
    driver.load()
    assert driver.pool.num_free == 16
    driver.drain()
    assert not driver.tokens


def test_a_cancellation_that_overtakes_its_request_holds() -> None:
    driver = LocalPrefillDriver(16)
    driver.cancel("a")
    driver.submit(range(8), "a")
    assert driver.step is None


def test_a_prompt_waits_for_blocks_before_landings_that_came_later() -> None:
    """With six of eight blocks held, a prompt that needs three waits, and so does a later landing that needs one."""
    driver = LocalPrefillDriver(8)
    driver.start(range(22), "a", max_tokens=3)
    driver.submit(range(100, 110), "b")
    driver.reserve(range(200, 203), "c")
    assert driver.grant_of("lease-c") is None
    driver.compute()
    driver.compute()
    assert ("b", 0, 10) in driver.step_of()
    assert driver.grant_of("lease-c") is not None


def test_impossible_prompts_are_refused() -> None:
    driver = LocalPrefillDriver(4)
    driver.submit(range(30), "large")
    driver.submit(range(14), "a")
    driver.submit(range(100, 114), "late", timeout_s=1.0)
    driver.wait(2.0)
    driver.handle(events.Draining(is_on=True))
    driver.submit(range(8), "drained")
    errors = {name: type(fails[0].error) for name, fails in driver.failures.items()}
    assert errors == {"large": InvalidRequest, "late": DeadlineExceeded, "drained": NoWorker}
    driver.submit(range(8), "a")
    driver.handle(events.Stopped())
    assert isinstance(driver.failures["a"][0].error, PeerLost | NoWorker)


prompts = st.tuples(st.sampled_from([0, 50]), st.integers(1, 22)).map(
    lambda wish: [wish[0] + i for i in range(wish[1])]
)


class LocalPrefillWorker(RuleBasedStateMachine):
    """Random submissions, landings, cancellations and faults on a tiny pool; `handle` validates after every event."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = LocalPrefillDriver(9, max_num_seqs=3, max_num_batched_tokens=40, max_model_len=30)
        self.driver.find_home()
        self.excused: set[str] = set()
        self.submitted: list[str] = []
        self.numbers = itertools.count(1)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 6),
        num_stored=st.integers(0, 3),
        num_scored_top=st.sampled_from([None, None, 2]),
    )
    def submit(self, prompt: list[int], max_tokens: int, num_stored: int, num_scored_top: int | None) -> None:
        number = next(self.numbers)
        self.submitted.append(f"r{number}")
        stored, gateway = min(num_stored, len(prompt) // 4), "odd" if number % 2 else "even"
        wishes = {"max_tokens": max_tokens, "gateway": gateway, "num_prompt_logprobs": num_scored_top}
        self.driver.submit(prompt, f"r{number}", num_stored=stored, **wishes)

    @rule(prompt=prompts, max_tokens=st.integers(2, 6))
    def land(self, prompt: list[int], max_tokens: int) -> None:
        name = f"r{next(self.numbers)}"
        self.driver.reserve(prompt, name)
        if self.driver.grant_of(f"lease-{name}") is not None:
            self.driver.start(prompt, name, max_tokens=max_tokens)

    @precondition(lambda self: self.driver.step is not None)
    @rule(times=st.integers(1, 4))
    def compute(self, times: int) -> None:
        for _ in range(times):
            if self.driver.step is not None:
                self.driver.compute()

    @precondition(lambda self: self.driver.loads)
    @rule(num_good=st.integers(0, 3), fails=st.booleans())
    def load(self, num_good: int, fails: bool) -> None:
        self.driver.fail_load() if fails else self.driver.load(num_good)

    @precondition(lambda self: self.driver.seals)
    @rule()
    def seal(self) -> None:
        self.driver.seal()

    @precondition(lambda self: self.driver.puts)
    @rule(fails=st.booleans())
    def put(self, fails: bool) -> None:
        self.driver.put(fails=fails)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), again=st.booleans())
    def cancel(self, data: st.DataObject, again: bool) -> None:
        name = data.draw(st.sampled_from(self.submitted[-4:]))
        self.excused.add(name)
        self.driver.cancel(name)
        if again:
            self.driver.submit(range(300, 307), name, max_tokens=2)

    @rule(gateway=st.sampled_from(["even", "odd"]))
    def lose_gateway(self, gateway: str) -> None:
        lost = [n for n in self.submitted if (int(n[1:]) % 2 == 0) == (gateway == "even")]
        self.excused.update(lost)
        self.driver.handle(events.GatewayLost(gateway_id=GatewayId(gateway)))

    @invariant()
    def steps_keep_to_the_budget(self) -> None:
        """No step exceeds the budget, except by the smallest chunk if decoding alone uses all of it."""
        if self.driver.step is not None:
            decode_s = 0.004 + 0.001 * len(self.driver.step.slices)
            assert self.driver.step_s <= max(BUDGET.max_step_s, decode_s + 0.001 * MIN_CHUNK_TOKENS)

    @invariant()
    def who_decodes_is_in_every_step(self) -> None:
        if self.driver.step is not None and len(self.driver.step.slices) > 1:
            first, *others = [piece.num_tokens for piece in self.driver.step.slices]
            assert first == 1 or all(count > 1 for count in others)

    def teardown(self) -> None:
        """Checks that each request has all tokens, has failed, or was cancelled or lost, and that nothing is held."""
        self.driver.drain()
        for name in self.submitted:
            tokens = self.driver.tokens.get(name, [])
            is_done = bool(tokens) and tokens[-1].finish_reason is not None
            assert is_done or name in self.driver.failures or name in self.excused, name


TestLocalPrefillWorker = any_order(LocalPrefillWorker, 60)


def test_a_scored_prompt_is_computed_whole_and_shares_what_it_computed() -> None:
    driver = LocalPrefillDriver(16)
    prompt = list(range(14))
    driver.submit(prompt, "a", max_tokens=2, num_stored=3, num_prompt_logprobs=2)
    assert not driver.loads, "what could be read is computed"
    driver.compute()
    driver.settle()
    assert driver.reports["a"].prompt_logprobs is not None
    driver.submit(prompt, "b", max_tokens=2, num_prompt_logprobs=2)
    driver.submit(prompt, "c", max_tokens=2)
    driver.compute()
    assert driver.step_of() == [("b", 0, 14), ("c", 12, 14)]


def test_a_step_holds_a_bounded_number_of_scored_tokens() -> None:
    driver = LocalPrefillDriver(256, budget=None, max_num_batched_tokens=900, max_model_len=900)
    driver.submit(range(400), "a", num_prompt_logprobs=0)
    driver.submit(range(1_000, 1_400), "b", num_prompt_logprobs=0)
    assert driver.step_of() == [("a", 0, MAX_SCORED_TOKENS)]
    driver.compute()
    assert driver.step_of() == [("a", MAX_SCORED_TOKENS, 400), ("b", 0, 2 * MAX_SCORED_TOKENS - 400)]
