"""Structured output: from a client's parameters to a grammar for workers, or to a 400 that names the parameter."""

import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.gateway.errors import ApiError
from moonserve.gateway.openai.request_schema import BodyParser, CompletionBody
from moonserve.gateway.openai.structured_outputs import OutputConstraint, constraint_of
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.errors import InvalidRequest
from tests.gateway.conftest import GRAMMARS, follows, post, refused
from tests.gateway.scripted_cluster import ScriptedCluster
from tests.thoroughness import examples

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "it", "schema": SCHEMA, "strict": True}


def form(**fields: Any) -> OutputConstraint | None:
    raw = json.dumps({"prompt": "x", **fields}).encode()
    return constraint_of(BodyParser().parse(CompletionBody, raw))


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"x": [1, "é"]}', "{}"], ["[]", "{"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            ['{"a": 1}', '{"a":1}', '{\n  "a": -20\n}'],
            ['{"a": "1"}', "{}", '{"a": 1}}', '{  "a": 1}'],
        ),
        ({"guided_json": json.dumps(SCHEMA)}, ['{"a": 7}'], ['{"a": }']),
        ({"guided_regex": r"\d{2}/(ab|c)+"}, ["12/abcc"], ["1/c", "12/", "12/c "]),
        ({"guided_choice": ["red", 'gr"ün', "\n\\"]}, ["red", 'gr"ün', "\n\\"], ["re", "redred"]),
        ({"guided_grammar": 'start: "a" b*\nb: "b" | "c"'}, ["a", "abcb"], ["b", "aa"]),
        ({"guided_grammar": 'root ::= "a" [0-9]+'}, ["a1", "a22"], ["a"]),
        ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": "~"}}, ['{"a"~:1}'], ['{"a": 1}']),
        ({"structured_outputs": {"regex": "ab?"}}, ["a"], ["b"]),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ["no"], ["n"]),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, ["x"], ["y"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_grammar_allows_exactly_the_required_form(
    fields: dict[str, Any], good: list[str], bad: list[str], tokenizer: Tokenizer
) -> None:
    found = form(**fields)
    grammar = found.grammar
    assert all(follows(grammar, text, tokenizer) for text in good)
    assert not any(follows(grammar, text, tokenizer) for text in bad)


def test_text_format_and_no_format_give_no_constraint() -> None:
    assert form(response_format={"type": "text"}) is None
    assert form(guided_json=None, structured_outputs={}) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Contradictory or malformed.
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_regex": "a\\"}, "guided_regex"),
    ({"guided_grammar": "nonsense"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    # Unsupported by workers.
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_json": {"type": "thing"}}, "guided_json"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"guided_json": {"$ref": "https://example.org/schema"}}, "guided_json"),
    ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json"),
]


async def test_impossible_constraint_is_refused_before_placement(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    for fields, param in REFUSED:
        error = await refused(http, "/v1/completions", 400, json={"prompt": "x", **fields})
        assert error["param"] == param, fields
    assert not cluster.places


async def test_every_choice_carries_the_grammar_to_its_worker(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 2}
    form = {"response_format": {"type": "json_schema", "json_schema": NAMED}}
    await post(http, "/v1/chat/completions", {**body, **form})
    await post(http, "/v1/chat/completions", {**body, "n": 1})
    grammars = [submission.sampling.grammar for submission in cluster.submissions]
    assert [bool(grammar) for grammar in grammars] == [True, True, False]
    assert '"integer"' in grammars[0] == grammars[1]


@given(st.text(max_size=60) | st.text(alphabet='rot:=|()[]{}*+?"\\/%<>a-z \n', max_size=60))
@settings(max_examples=examples(150), deadline=None)
def test_any_grammar_text_compiles_or_is_refused(text: str) -> None:
    for name in ("guided_grammar", "guided_regex", "guided_json"):
        try:
            found = form(**{name: text})
            GRAMMARS.new_matcher(found.grammar)
        except (ApiError, InvalidRequest):
            continue
