"""Drafts change no bit of the output: a real engine gives equal tokens and log-probabilities with and without them."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.speculation import Speculation
from moonserve.engine.engine import Engine
from moonserve.models import demo_model_path
from moonserve.protocol.request import FinishReason, RequestId, SamplingParams, Token
from moonserve.worker.events import Action
from tests.decode_worker.driver import ALWAYS, BLOCK_SIZE, Driver, PretendedMemory
from tests.engine.kernels.calls import kernels_folder
from tests.engine.steps import load_engine, make_slice
from tests.prefill_worker.builders import make_request

NUM_BLOCKS = 400
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "self.assertEqual(f(1), 1)\n" * 3 + "self.assertEqual(f(2),",
    "import os\nimport sys\nimport re\nimport",
)
GREEDY = SamplingParams(max_tokens=45, temperature=0.0, num_logprobs=3)
DRAWN = replace(GREEDY, temperature=0.7, seed=11, top_p=0.9)
WISHES = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "penalised": replace(GREEDY, repetition_penalty=1.05, frequency_penalty=0.1, presence_penalty=0.1),
    "biased, with bad words": replace(DRAWN, temperature=0.3, logit_bias={10: 3.0}, bad_words=((12,), (10, 11))),
    "short": replace(GREEDY, max_tokens=14),
}


class EngineDriver(Driver):
    """Decode worker's state over a real engine, which also computes the prompts."""

    def __init__(self, engine: Engine, num_blocks: int, speculation: Speculation | None) -> None:
        super().__init__(
            num_blocks, speculation=speculation, max_num_batched_tokens=24, max_num_seqs=len(TEXTS) * len(WISHES)
        )
        self.memory = Mock(spec=PretendedMemory)  # the engine has real KV
        self.engine = engine

    def begin(self, prompt: list[int], name: str, sampling: SamplingParams) -> None:
        self.reserve(prompt, name, wait_s=1e9)
        while (grant := self.grant_of(f"lease-{name}")) is None:
            assert self.advance()
        whole = make_slice(prompt, grant.num_cached * BLOCK_SIZE, len(prompt), grant.blocks, sampling=sampling)
        [first] = self.engine.execute([whole])
        request = replace(make_request(name, prompt), token_ids=(*prompt, first.token_id), sampling=sampling)
        self.commit(replace(request, timeout_s=1e9))
        self.drain_landing()

    def compute(self) -> list[Action]:
        step = self.steps.popleft()
        return self.handle(events.StepDone(sampled=self.engine.execute(step.slices)))


def outputs(
    engine: Engine, wishes: dict[str, SamplingParams], speculation: Speculation | None, num_blocks: int = NUM_BLOCKS
) -> tuple[dict[str, list[Token]], EngineDriver]:
    """Returns the output of each wish after each text, all in one batch."""
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    driver = EngineDriver(engine, num_blocks, speculation)
    for name, wish in wishes.items():
        for number, text in enumerate(TEXTS):
            driver.begin(tokenizer.encode(text).ids, f"{name} {number}", wish)
    driver.drain()
    return driver.tokens, driver


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Engine:
    native = {"kernels": "native", "attention": "native", "cache_folder": kernels_folder()}
    return load_engine(demo_model_path(), BLOCK_SIZE, dtype=request.param, num_blocks=NUM_BLOCKS, **native)


def test_tokens_logprobs_and_ends_are_those_without_drafts(engine: Engine) -> None:
    """Also if sequences are preempted and their output is computed again. The prompts share a prefix with no one."""
    said, _ = outputs(engine, {"greedy": GREEDY}, None)
    greedy = [token.token_id for token in said["greedy 0"]]
    stop = next(token for token in reversed(greedy[:-5]) if greedy.index(token) > 10)  # only far behind
    stopping = replace(GREEDY, stop_token_ids=frozenset({stop}), max_tokens=60)
    wishes = {**WISHES, "stopped": stopping, "not before 30": replace(stopping, min_tokens=30)}
    plain, reference = outputs(engine, wishes, None)
    assert plain["stopped 0"][-1].finish_reason is FinishReason.STOP
    drafts = replace(ALWAYS, num_tokens=6, lookup_min=1, max_rows=1_000)
    for num_blocks in (NUM_BLOCKS, 90):
        found, driver = outputs(engine, wishes, drafts, num_blocks)
        assert found == plain
        counters = driver.state.counters
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert counters.steps < reference.state.counters.steps or counters.num_preemptions > 0
    assert counters.num_preemptions > 0, "of the small pool"


def test_rows_of_a_draft_sample_what_single_tokens_sample(engine: Engine) -> None:
    """Beside another sequence, whatever the draft is: a wrong token changes only what follows it."""
    tokens, sampling = [5, 6, 7, 8, 9, 10, 11, 12], replace(DRAWN, frequency_penalty=0.5)
    other = make_slice([3, 4, 5], 0, 3, [50], request_id="other")
    blocks = [1, 2]
    engine.execute([make_slice(tokens, 0, 4, blocks, num_prompt_tokens=2)])
    singly = [
        engine.execute([make_slice(tokens[: end + 1], end, end + 1, blocks, sampling=sampling, num_prompt_tokens=2)])[0]
        for end in range(4, 8)
    ]
    drafted = replace(make_slice(tokens, 4, 8, blocks, sampling=sampling, num_prompt_tokens=2), num_draft=3)
    alone, found = engine.execute([other])[0], engine.execute([drafted, other])
    assert [replace(found[0], after_draft=()), *found[0].after_draft] == singly
    assert found[1] == alone
    assert {each.request_id for each in found[0].after_draft} == {RequestId("request")}
