"""The coupled opponent: both phases in one batch, prefixes shared, and the same tokens as the product's cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import coupled_live
from benchmarks.coupled_live import SIDES, cluster_of
from decode_worker import actions, events
from decode_worker.limits import Limits
from deploy.undivided.events import SealBlocks, Sealed, Submitted
from deploy.undivided.state import UndividedState
from engine.batch import Sampled, Slice
from engine.block_pool import BlockPool
from protocol.ids import GatewayId, RequestId
from protocol.keys import block_keys, root_key
from protocol.request import PrefillReport, Request, SamplingParams
from tests.ports import free_port
from tests.thoroughness import examples
from traces.client import StreamClient

BLOCK, BUDGET, BLOCKS = 4, 8, 12
ROOT = root_key("coupled")
MOST_PROMPTS = 20


def request(name: str, token_ids: Sequence[int], max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        gateway_id=GatewayId("gateway"),
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        block_keys=tuple(block_keys(ROOT, token_ids, BLOCK)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


class Worker:
    """A state with an engine that samples 7; one step per call."""

    def __init__(self) -> None:
        pool = BlockPool(BLOCKS, on_added=lambda *_: None, on_removed=lambda *_: None)
        limits = Limits(
            block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=BUDGET, max_model_len=40
        )
        self.state = UndividedState(pool, limits)
        self.steps: list[list[tuple[str, int, int]]] = []
        self.tokens: dict[str, int] = {}
        self.reports: dict[str, PrefillReport] = {}
        self._next: Sequence[Slice] = ()
        self._now = 0.0

    @property
    def is_stepping(self) -> bool:
        return bool(self._next)

    def submit(self, wish: Request) -> None:
        self._take(self.state.handle(Submitted(request=wish), self._now))

    def step(self) -> None:
        slices, self._next = self._next, ()
        self.steps.append([(s.request_id, s.start, s.end) for s in slices])
        assert sum(s.num_tokens for s in slices) <= BUDGET
        self._now += 1.0
        sampled = [
            Sampled(request_id=s.request_id, token_id=7) if s.samples else None for s in slices
        ]
        self._take(self.state.handle(events.StepDone(sampled=sampled), self._now))

    def _take(self, out: Sequence[actions.Action]) -> None:
        self.state.validate()
        for action in out:
            match action:
                case actions.RunStep(slices=slices):
                    self._next = slices
                case SealBlocks(seal_id=seal_id, blocks=blocks):
                    sealed = Sealed(seal_id=seal_id, checksums=(0,) * len(blocks))
                    self._take(self.state.handle(sealed, self._now))
                case actions.SendTokens(tokens=tokens):
                    for token in tokens:
                        assert token.index == self.tokens.get(token.request_id, 0)
                        self.tokens[token.request_id] = token.index + 1
                        report = self.state.report(token.request_id, self._now)
                        assert (report is not None) == (token.index == 0)
                        if report is not None:
                            self.reports[token.request_id] = report


def test_a_prompt_is_computed_in_chunks_beside_those_who_decode() -> None:
    """A budget of 8: one token for who decodes, seven of the prompt beside it."""
    worker = Worker()
    worker.submit(request("a", range(6), 4))
    worker.submit(request("b", range(20, 30), 2))
    for _ in range(3):
        worker.step()
    assert worker.steps == [
        [("a", 0, 6)],
        [("a", 6, 7), ("b", 0, 7)],
        [("a", 7, 8), ("b", 7, 10)],
    ]
    assert worker.tokens == {"a": 3, "b": 1}
    assert worker.reports["a"].compute_s == 1.0


def test_a_prompt_begins_where_an_earlier_one_was_like_it() -> None:
    """Two full blocks of nine equal tokens; the report says so."""
    worker = Worker()
    worker.submit(request("a", range(9), 1))
    worker.step()
    worker.step()
    worker.submit(request("b", [*range(9), 50], 1))
    worker.step()
    assert worker.steps[-1] == [("b", 8, 10)]
    assert [worker.reports[name].cached_tokens for name in "ab"] == [0, 8]


@settings(max_examples=examples(30), deadline=None)
@given(
    wishes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    )
)
def test_every_request_gets_its_tokens_once_and_in_order(
    wishes: list[tuple[int, int, bool, int]],
) -> None:
    """Whatever shares a prefix, and although the pool is too small for all at once."""
    worker = Worker()
    for number, (length, max_tokens, is_alike, num_steps) in enumerate(wishes):
        first = 0 if is_alike else 100 * number
        worker.submit(request(f"r{number}", range(first, first + length), max_tokens))
        for _ in range(num_steps if worker.is_stepping else 0):
            worker.step() if worker.is_stepping else None
    while worker.is_stepping:
        worker.step()
    assert worker.tokens == {f"r{n}": wish[1] for n, wish in enumerate(wishes)}
    assert worker.state.num_free_blocks == BLOCKS


@pytest.mark.parametrize("side", SIDES)
def test_both_sides_of_the_comparison_serve_and_share_prefixes(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes. Prompts that begin alike and go on differently: until the conductor has heard of the first one's
    blocks, which is a heartbeat later, the next ones may go to a worker that has them or to the other one."""
    monkeypatch.setattr(coupled_live, "free_port", free_port)
    first, *others = asyncio.run(_cached_tokens(side))
    assert first == 0
    assert set(others) <= {0, 96}
    assert others[-1] == 96


async def _cached_tokens(side: str) -> list[int]:
    """Of prompts one after the other, up to the first that found what was there."""
    stem = list(range(20, 120))
    found: list[int] = []
    async with cluster_of(side) as url, StreamClient(url) as client:
        facts = await client.model(None)
        while len(found) < MOST_PROMPTS and not any(found):
            prompt = [*stem, *[200 + len(found)] * 40]
            outcome = await client.complete(facts.name, prompt, max_tokens=5)
            assert outcome.succeeded
            assert len(outcome.token_ids) == 5
            found.append(outcome.cached_tokens)
    return found
