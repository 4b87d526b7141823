"""Grammar masks: a random model under masks writes valid answers, whatever other sampling options are set."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.generate import generate
from moonserve.engine.engine import EngineThread
from moonserve.engine.model.batch import Slice
from moonserve.engine.model.grammar_masks import AllowedTokens, GrammarMasks
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.grammar import MAX_GRAMMAR_CHARS
from moonserve.protocol.request import FinishReason, SamplingParams
from tests.engine.conftest import Pair
from tests.engine.steps import last_of, random_prompt
from tests.random_models import EOS, VOCAB_SIZE
from tests.thoroughness import examples

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["prefill", "decode", "Zürich"]},
        "blocks": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "note": {"type": "string", "maxLength": 4},
        "share": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "blocks", "note", "share"],
    "additionalProperties": False,
}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
JSON_GRAMMAR = f"start: %json {json.dumps({**SCHEMA, **COMPACT})}"
DEFAULTS = SamplingParams(max_tokens=200, stop_token_ids=frozenset({EOS}), grammar=JSON_GRAMMAR, temperature=1.0)


def masks_of(pair: Pair) -> GrammarMasks:
    return GrammarMasks(pair.path, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def piece(generated: list[int], grammar: str = JSON_GRAMMAR, request_id: str = "request") -> Slice:
    sampling = replace(DEFAULTS, grammar=grammar)
    return replace(last_of([1, 2, 3, *generated], sampling, 3), request_id=request_id)


def text_of(token_ids: list[int]) -> str:
    """Decodes ids of the byte-level tokenizer, whose first 256 ids are the bytes."""
    return bytes(token_id for token_id in token_ids if token_id < 256).decode()


def only(found: list[AllowedTokens | None]) -> Any:
    [allowed] = found
    assert allowed.failure is None
    return allowed.mask


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 3.0, "top_k": 5},
        {"top_p": 0.2, "min_p": 0.3},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 5.0},
        {"logit_bias": {ord("!"): 100.0, ord("{"): -100.0, EOS: 100.0}},
        {"min_tokens": 190},
        {"num_logprobs": 3},
    ],
    ids=str,
)
def test_every_answer_of_a_random_model_matches_its_grammar(llama: Pair, wishes: dict[str, Any]) -> None:
    samplings = [replace(DEFAULTS, seed=seed, **wishes) for seed in range(4)]
    prompts = [random_prompt(20, seed=seed) for seed in range(4)]
    for answer in generate(llama.engine(), prompts, samplings, chunk_size=32):
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] == EOS
        jsonschema.validate(json.loads(text_of(answer.token_ids)), SCHEMA)


def test_requests_without_grammar_are_not_affected_by_neighbours_with_one(llama: Pair) -> None:
    engine = llama.engine()
    plain = replace(DEFAULTS, grammar="", max_tokens=12, seed=5)
    [alone] = generate(engine, [random_prompt(20)], plain)
    beside, constrained = generate(engine, [random_prompt(20), random_prompt(20)], [plain, replace(DEFAULTS, seed=5)])
    assert beside.token_ids == alone.token_ids
    assert json.loads(text_of(constrained.token_ids))
    assert engine.grammars.begin([piece([], grammar="")]) is None


@given(st.data())
@settings(max_examples=examples(20), deadline=None)
def test_mask_depends_only_on_the_tokens(llama: Pair, data: st.DataObject) -> None:
    """A mask does not depend on earlier calls: the same request further on, set back, or another answer with its id."""
    masks = masks_of(llama)
    answers: list[list[int]] = [[], []]
    for _ in range(data.draw(st.integers(1, 25), label="steps")):
        which = data.draw(st.integers(0, 1), label="answer")
        tokens = answers[which]
        if tokens and data.draw(st.booleans(), label="sets back"):
            del tokens[data.draw(st.integers(0, len(tokens) - 1)) :]
        mask = only(masks.of([piece(tokens)]))
        fresh = only(masks_of(llama).of([piece(tokens)]))
        assert (mask == fresh).all()
        token_id = data.draw(st.sampled_from(np.flatnonzero(mask).tolist()), label="token")
        if token_id != EOS:
            tokens.append(token_id)


def test_only_the_end_token_is_allowed_after_a_complete_answer(llama: Pair) -> None:
    masks, grammar = masks_of(llama), 'start: "ab" "c"?'
    written = (b"", b"a", b"ab", b"abc")
    allowed = [np.flatnonzero(only(masks.of([piece(list(text), grammar)]))) for text in written]
    assert [ids.tolist() for ids in allowed] == [[ord("a")], [ord("b")], [ord("c"), EOS], [EOS]]


def test_impossible_grammar_fails_only_its_own_request(llama: Pair) -> None:
    endless = piece(list(b"abc"), 'start: "abc"', "endless")
    endless.sampling = replace(endless.sampling, stop_token_ids=frozenset())
    asked = [piece([ord("{")]), piece([ord("x")]), piece([], grammar=""), endless]
    good, *others = masks_of(llama).of(asked)
    assert only([good]) is not None
    assert others[1] is None
    failures = [each.failure for each in (others[0], others[2]) if each is not None]
    assert "cannot be followed" in str(failures[0])
    assert failures[1] == "the answer is complete, and no stop token may end it"
    broken = replace(DEFAULTS, grammar="start: nothing")
    with pytest.raises(InvalidRequest, match="unknown name"):
        generate(llama.engine(), [random_prompt(20)], broken)


def test_matchers_of_ended_requests_are_dropped(llama: Pair) -> None:
    masks = masks_of(llama)
    masks.of([piece([], request_id="gone")])
    for _ in range(300):
        masks.of([piece([], request_id="here")])
    assert list(masks._followers) == ["here"]


async def test_invalid_grammar_is_refused_before_any_step(llama: Pair) -> None:
    thread = EngineThread(llama.engine())
    try:
        await thread.prepare(DEFAULTS)
        with pytest.raises(InvalidRequest, match="look-around"):
            await thread.prepare(replace(DEFAULTS, grammar="start: /(?=x)/"))
        with pytest.raises(InvalidRequest, match="is longer than"):
            await thread.prepare(replace(DEFAULTS, grammar="x" * (MAX_GRAMMAR_CHARS + 1)))
    finally:
        thread.close()


def test_missing_tokenizer_and_missing_end_token_are_reported(tmp_path: Any) -> None:
    for eos, complaint in (([EOS], "put its tokenizer.json there"), ([], "no end-of-sequence")):
        masks = GrammarMasks(tmp_path, vocab_size=VOCAB_SIZE, eos_token_ids=eos)
        with pytest.raises(InvalidRequest, match=complaint):
            masks.prepare(JSON_GRAMMAR)


def test_step_begun_ahead_has_the_same_masks(llama: Pair) -> None:
    """The step ahead begins before its only token, sampled by the previous step, is in the sequence."""
    [waited] = generate(llama.engine(), [random_prompt(25)], replace(DEFAULTS, seed=4))
    engine, tokens = llama.engine(), random_prompt(25)
    one = replace(piece([]), token_ids=tokens, start=0, end=25, num_prompt_tokens=25)
    one.block_table, one.sampling = list(range(16)), replace(DEFAULTS, seed=4)
    step, end = engine.begin([one]), 25
    while tokens[-1] != EOS:
        ahead = engine.begin([replace(one, start=end, end=end + 1, token_from_previous_step=True)])
        [sampled] = step.end()
        tokens.append(sampled.token_id)
        step, end = ahead, end + 1
    assert tokens[25:] == waited.token_ids
