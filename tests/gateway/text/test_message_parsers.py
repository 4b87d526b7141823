"""Parsing of reasoning and tool calls from text: as models write them, in any pieces, malformed in any way."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.gateway.text.harmony import HarmonyParser
from moonserve.gateway.text.message_parser import CallDelta, MessageParser, ParsedDelta
from moonserve.gateway.text.reasoning import TAGS, ReasoningParser
from moonserve.gateway.text.tool_call_parsers import HermesParser, Llama3JsonParser
from tests.thoroughness import examples

NAMES = ("get_weather", "add")
FORMATS = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}

Read = tuple[str, list[tuple[str, str]]]  # content; names and arguments


def parser_of(kind: str, *, is_eager: bool) -> MessageParser:
    if kind == "think":
        return ReasoningParser(TAGS[0], HermesParser(NAMES, is_eager=is_eager))
    return HarmonyParser(NAMES, is_eager=is_eager) if kind == "harmony" else FORMATS[kind](NAMES, is_eager=is_eager)


def read(kind: str, pieces: Iterable[str], *, is_eager: bool = False, is_cut: bool = False) -> Read:
    reasoning, *rest = read_all(parser_of(kind, is_eager=is_eager), pieces, is_cut=is_cut)
    assert not reasoning
    return rest[0], rest[1]


def read_all(
    parser: MessageParser, pieces: Iterable[str], *, is_cut: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns the reasoning, the content and the calls."""
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for piece in (*pieces, None):
        if piece is None:
            parser.finish(is_cut=is_cut)
        else:
            parser.push(piece)
        delta = parser.take_output()
        reasoning += delta.reasoning
        content += delta.content
        for index, called in delta.calls.items():
            if called.name is not None:
                assert index == len(calls), "calls come in order"
                calls.append((called.name, ""))
            assert index == len(calls) - 1, "arguments follow their call"
            calls[index] = (calls[index][0], calls[index][1] + called.arguments)
    assert parser.num_calls == len(calls)
    return reasoning, content, calls


CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ADD = ("add", '{"a": 1, "b": [2, "}"]}')
TURNED = '{ "arguments" : {"x": "<tool_call>"} , "id": 7, "name" : "get_weather" }'
WEATHER = ("get_weather", '{"x": "<tool_call>"}')
WRONG_NAME = '{"name": "rm", "arguments": {}}'
NO_OBJECT = '{"name": "add", "arguments": [1]}'
NO_ARGUMENTS = '{"name": "add"}'
BROKEN = '{"name": "add", "arguments": {"a": }}'
NO_VALUES = ("01", "1x", "-", "tru", '"\\q"', '"\\u12g4"', '"\x01"', "1" * 500, "[" * 300)
VALUES = ("0", "-1.5e+7", "true", "null", '"\\n\\u00e9\\""', '[{"b": []}, {}]', "1" * 300)


def adding(value: str) -> str:
    return f'{{"name": "add", "arguments": {{"a": {value}}}}}'


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


# The kind of a parser, a text, and the content and calls in it.
WITH_CALLS: list[tuple[str, str, Read]] = [
    ("hermes", "Hello <b>.\n", ("Hello <b>.\n", [])),
    ("hermes", tagged(CALL), ("", [ADD])),
    ("hermes", f"I look.\n\n{tagged(CALL)}\n{tagged(TURNED)}\n", ("I look.\n", [ADD, WEATHER])),
    ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", ("", [ADD, ADD])),
    ("hermes", f"{tagged(CALL)} then", (" then", [ADD])),
    ("hermes", f"a {tagged(WRONG_NAME)} b", (f"a {tagged(WRONG_NAME)} b", [])),
    ("hermes", tagged(NO_OBJECT), (tagged(NO_OBJECT), [])),
    ("hermes", tagged(NO_ARGUMENTS), (tagged(NO_ARGUMENTS), [])),
    ("hermes", tagged(BROKEN) + tagged(CALL), (tagged(BROKEN), [ADD])),
    ("hermes", "<tool_call><tool_call>" + CALL, ("<tool_call>", [ADD])),
    ("hermes", "a <tool_ca", ("a <tool_ca", [])),
    *(("hermes", tagged(adding(v)), (tagged(adding(v)), [])) for v in NO_VALUES),
    *(("hermes", tagged(adding(v)), ("", [("add", f'{{"a": {v}}}')])) for v in VALUES),
    ("llama3_json", CALL.replace("arguments", "parameters"), ("", [ADD])),
    ("llama3_json", f"\n<|python_tag|>{CALL}; {TURNED}\n", ("", [ADD, WEATHER])),
    ("llama3_json", f"I say {CALL}", (f"I say {CALL}", [])),
    ("llama3_json", f"{CALL} I say {CALL}", (f" I say {CALL}", [ADD])),
    ("llama3_json", ' {"name": "Bob", "parameters": {}}', (' {"name": "Bob", "parameters": {}}', [])),
    ("llama3_json", '<|python_tag|>search.call(q="x")', ('<|python_tag|>search.call(q="x")', [])),
    ("llama3_json", "<|python", ("<|python", [])),
]  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_call_counts_if_it_was_certain(kind: str) -> None:
    start = "<tool_call>" if kind == "hermes" else ""
    text = start + CALL[: CALL.index("2")]
    for is_eager in (True, False):
        cut = read(kind, [text], is_eager=is_eager, is_cut=True)
        assert cut == ("", [("add", '{"a": 1, "b": [')])
    assert read(kind, [text]) == (text, [])
    early = start + '{"name": "add", "argum'
    assert read(kind, [early], is_cut=True) == (early, [])


def test_eager_parser_streams_arguments_and_retracts_nothing() -> None:
    parser = HermesParser(NAMES, is_eager=True)
    for piece, delta in (
        ('<tool_call>{"name": "add", ', ParsedDelta()),
        ('"arguments": {"a"', ParsedDelta(calls={0: CallDelta("add", '{"a"')})),
        (": 1", ParsedDelta(calls={0: CallDelta(None, ": 1")})),
        (" oh}}</tool_call>", ParsedDelta("", "oh}}</tool_call>", {0: CallDelta(None, " ")})),
    ):
        parser.push(piece)
        assert parser.take_output() == delta
    assert parser.num_calls == 1


THOUGHT = "<|channel|>analysis<|message|>"
AGAIN = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ADDING = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        *((kind, text, ("", *found)) for kind, text, found in WITH_CALLS),
        ("think", "<think>\nI see\n\n</think>\n\nYes.\n", ("I see", "Yes.\n", [])),
        ("think", "\n<think></think> Yes", ("", "Yes", [])),
        ("think", f"<think>a < b</think>{tagged(CALL)}", ("a < b", "", [ADD])),
        ("think", " I <think> not", ("", " I <think> not", [])),
        ("think", "<think>cut </thi", ("cut </thi", "", [])),
        ("think", "\n<thi", ("", "\n<thi", [])),
        ("harmony", f"{THOUGHT}I see{AGAIN}{FINAL}Yes<|return|>", ("I see", "Yes", [])),
        ("harmony", f"{THOUGHT}a{AGAIN}{THOUGHT}b{AGAIN}{FINAL}c{AGAIN}{FINAL}d", ("a\nb", "c\nd", [])),
        ("harmony", f'{THOUGHT}a{AGAIN}{ADDING}{{"a": 1}}<|call|>', ("a", "", [("add", '{"a": 1}')])),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', ("", "", [("add", '{"a": 1}')])),
        ("harmony", f"<|channel|>commentary<|message|>I add{AGAIN}{ADDING}{{}}", ("", "I add", [("add", "{}")])),
        ("harmony", f"{ADDING}[1]<|call|>", ("", "[1]", [])),
        ("harmony", f"{ADDING.replace('add', 'rm')}{{}}<|call|>", ("", "{}", [])),
        ("harmony", '{"json": [1]}', ("", '{"json": [1]}', [])),
        ("harmony", f"{FINAL}Yes<|end|> and more", ("", "Yes and more", [])),
        ("harmony", f"{THOUGHT}a < b <|en", ("a < b <|en", "", [])),
        ("harmony", f"{THOUGHT}a{AGAIN}<|chan", ("a", "", [])),
        ("harmony", " <|", ("", " <|", [])),
        ("harmony", "to=x, as in to=y", ("", "to=x, as in to=y", [])),
    ],
)  # fmt: skip
def test_parser_tells_reasoning_content_and_calls_apart(kind: str, text: str, expected: Any) -> None:
    for pieces in ([text], list(text)):
        assert read_all(parser_of(kind, is_eager=False), pieces) == expected


@pytest.mark.parametrize(
    ("kind", "prompt", "text", "expected"),
    [
        ("think", "<|assistant|><think>\n", "I see</think>Yes", ("I see", "Yes", [])),
        ("think", "<think>\n\n</think>\n\n", "\n<think>Yes", ("", "<think>Yes", [])),
        ("harmony", "<|start|>assistant", f"{FINAL}Yes", ("", "Yes", [])),
        ("harmony", f"<|start|>assistant{THOUGHT}I s", f"ee{AGAIN}{FINAL}Yes", ("ee", "Yes", [])),
    ],
)
def test_message_goes_on_where_the_prompt_ends(kind: str, prompt: str, text: str, expected: Any) -> None:
    parser = parser_of(kind, is_eager=True)
    parser.start(prompt)
    assert read_all(parser, [text]) == expected


def test_cut_call_in_a_channel_is_reported_as_far_as_it_goes() -> None:
    for is_eager in (True, False):
        parser = parser_of("harmony", is_eager=is_eager)
        assert read_all(parser, [ADDING, '{"a": ', "1"], is_cut=True) == ("", "", [("add", '{"a": 1')])


# Properties

WORDS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", ";", "\n", " ", "<tool", "text", "{", "}"),
    *(CALL, TURNED, WRONG_NAME, NO_OBJECT, BROKEN, NO_ARGUMENTS, tagged(CALL), CALL[:30], '"', "\\"),
    '{"name": "add", "parameters": {"n": ' + "1" * 500 + "}}",
    *("<think>", "</think>", THOUGHT, AGAIN, FINAL, ADDING, "<|call|>", "<|start|>", "<|message|>", "to="),
    '{"name": "add", "note": "' + "x" * 4_090 + '<tool_call>", "arguments": {}}',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=8).map("".join)


@given(st.data(), st.sampled_from([*FORMATS, "think", "harmony"]), TEXTS, st.booleans(), st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_result_does_not_depend_on_how_text_is_split(
    data: st.DataObject, kind: str, text: str, is_eager: bool, is_cut: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), label="cuts"))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, split = (read_all(parser_of(kind, is_eager=is_eager), given, is_cut=is_cut) for given in ([text], pieces))
    assert whole == split


@given(st.sampled_from(sorted(FORMATS)), TEXTS)
@settings(max_examples=examples(300), deadline=None)
def test_parser_loses_no_text_and_calls_are_complete(kind: str, text: str) -> None:
    content, calls = read(kind, [text])
    for name, arguments in calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
        assert arguments in text
    if not calls:
        assert content == text


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
@settings(max_examples=examples(100), deadline=None)
def test_any_well_formed_calls_parse_back(kind: str, calls: list[tuple[str, dict[str, Any]]], is_eager: bool) -> None:
    key, between = ("arguments", "\n") if kind == "hermes" else ("parameters", "; ")
    written = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    text = between.join(map(tagged, written) if kind == "hermes" else written)
    content, found = read(kind, list(text), is_eager=is_eager)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
