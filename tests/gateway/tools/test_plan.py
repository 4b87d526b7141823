"""What a request's tools make of its answer: grammars that enforce calls, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.http.errors import ApiError
from gateway.openai.forms import FormChecker, form_of
from gateway.openai.schema import BodyParser, ChatBody
from gateway.openai.tools.formats import FORMATS, detect, format_of
from gateway.openai.tools.plan import ToolPlan, ToolPlanner
from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import GRAMMARS, follows

ADD = {
    "name": "add",
    "parameters": {
        "$defs": {"n": {"type": "integer"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now"}
# Which llguidance cannot follow exactly.
ODD = {"name": "odd", "parameters": {"type": "object", "not": {"required": ["x"]}}}


def tool(function: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**function, **fields}}


TOOLS = [tool(ADD), tool(NOW)]
NAMED = {"type": "function", "function": {"name": "now"}}


async def plan_of(
    kind: str | None = "hermes", *, special: str = "", allows_auto: bool = True, **fields: Any
) -> ToolPlan | None:
    raw = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    body = BodyParser().parse(ChatBody, raw)
    planner = ToolPlanner(
        FORMATS[kind] if kind else None,
        FormChecker(GRAMMARS),
        allows_auto=allows_auto,
        is_special=lambda text: text == special,
    )
    return await planner.plan(body, form_of(body))


def allows(plan: ToolPlan | None, text: str, tokenizer: Tokenizer) -> bool:
    assert plan is not None
    return follows(plan.grammar, text, tokenizer)


def call(kind: str, name: str, arguments: str) -> str:
    if kind == "hermes":
        inner = f'{{"name": "{name}", "arguments": {arguments}}}'
        return f"<tool_call>\n{inner}\n</tool_call>"
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.mark.parametrize(("kind", "between"), [("hermes", "\n"), ("llama3_json", "; ")])
async def test_required_calls_are_calls_of_what_is_offered(kind: str, between: str, tokenizer: Tokenizer) -> None:
    good, other = call(kind, "add", '{"a": 3}'), call(kind, "now", "{}")
    plan = await plan_of(kind, tools=TOOLS, tool_choice="required")
    assert allows(plan, good, tokenizer)
    assert allows(plan, good + between + other + between + good, tokenizer)
    for bad in ("", "hello", call(kind, "add", "{}"), call(kind, "rm", "{}"), good + " ok"):
        assert not allows(plan, bad, tokenizer)
    assert not allows(plan, call(kind, "now", '{"x": 1}'), tokenizer)
    single = await plan_of(kind, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert allows(single, good, tokenizer)
    assert not allows(single, good + between + other, tokenizer)
    named = await plan_of(kind, tools=TOOLS, tool_choice=NAMED)
    assert allows(named, other, tokenizer)
    assert not allows(named, good, tokenizer)
    assert not allows(named, other + between + other, tokenizer)


@pytest.mark.parametrize("kind", FORMATS)
async def test_a_free_choice_is_free_until_it_calls(kind: str, tokenizer: Tokenizer) -> None:
    assert (await plan_of(kind, tools=TOOLS)) == (await plan_of(kind, tools=TOOLS, tool_choice="auto"))
    free = await plan_of(kind, tools=TOOLS)
    assert free is not None
    assert free.grammar == ""
    strict = await plan_of(kind, tools=[tool(ADD, strict=True), tool(NOW)])
    for text in ("", "I know: <b> 4", call(kind, "add", '{"a": 3}'), call(kind, "now", '{"x": 1}')):
        assert allows(strict, text, tokenizer), text
    for text in (call(kind, "add", '{"b": 3}'), call(kind, "rm", "{}")):
        assert not allows(strict, text, tokenizer), text


async def test_text_around_strict_calls_is_free_and_one_call_can_be_all(tokenizer: Tokenizer) -> None:
    one = call("hermes", "add", '{"a": 3}')
    strict = await plan_of(tools=[tool(ADD, strict=True)])
    assert allows(strict, f"Well.\n{one}\n{one} so", tokenizer)
    single = await plan_of(tools=TOOLS, parallel_tool_calls=False)
    assert allows(single, f"Well.\n{one}", tokenizer)
    assert not allows(single, f"{one}\n{one}", tokenizer)


async def test_a_form_holds_where_the_model_does_not_call(tokenizer: Tokenizer) -> None:
    json_object = {"type": "json_object"}
    plan = await plan_of(tools=TOOLS, response_format=json_object)
    assert allows(plan, '{"z": [1]}', tokenizer)
    assert allows(plan, call("hermes", "add", '{"a": 3}'), tokenizer)
    assert not allows(plan, "hello", tokenizer)
    with pytest.raises(ApiError, match="does not go with tools"):
        await plan_of("llama3_json", tools=TOOLS, response_format=json_object)


async def test_tags_that_are_special_tokens_are_those(tokenizer: Tokenizer) -> None:
    """The demo model has no <tool_call>; its <|im_start|> stands for one here."""
    for choice in ("required", "auto"):
        with pytest.raises(ApiError, match="unknown special token"):
            await plan_of(tools=[tool(ADD, strict=True)], tool_choice=choice, special="<tool_call>")


async def test_schemas_that_cannot_be_followed_are_refused_for_strict_functions_only(tokenizer: Tokenizer) -> None:
    plan = await plan_of(tools=[tool(NOW), tool(ODD)], tool_choice="required")
    assert allows(plan, call("hermes", "odd", '{"y": 1}'), tokenizer)
    with pytest.raises(ApiError) as caught:
        await plan_of(tools=[tool(NOW), tool(ODD, strict=True)])
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("hermes", {"tool_choice": "auto"}, "tool_choice"),
        ("hermes", {"tools": [], "tool_choice": "required"}, "tool_choice"),
        ("hermes", {"tools": [tool({"name": "b ad"})]}, "tools[0].function.name"),
        ("hermes", {"tools": [tool(NOW), tool(NOW)]}, "tools[1].function.name"),
        ("hermes", {"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ("hermes", {"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ("hermes", {"tools": [tool(ADD)], "tool_choice": NAMED}, "tool_choice"),
        ("hermes", {"tools": TOOLS, "tool_choice": NAMED, "ignore_eos": True}, "ignore_eos"),
        ("hermes", {"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
        ("hermes", {"tools": TOOLS, "allows_auto": False}, "tool_choice"),
        (None, {"tools": TOOLS}, "tools"),
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused(kind: str | None, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        await plan_of(kind, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_nothing_is_called_where_nothing_may_be() -> None:
    assert await plan_of(None) is None
    assert await plan_of(None, tools=TOOLS, tool_choice="none") is None
    assert await plan_of(allows_auto=False, tools=TOOLS, tool_choice="required") is not None


def test_a_template_shows_its_format_and_the_operator_may_say_another() -> None:
    hermes, llama = FORMATS["hermes"], FORMATS["llama3_json"]
    qwen = 'return a json object within <tool_call></tool_call> tags: {"name": …, "arguments": …}'
    llama3 = 'Respond in the format {"name": function name, "parameters": …}. <|python_tag|>'
    assert detect(qwen) is hermes
    assert detect(llama3) is llama
    assert detect("{{ messages }}") is None
    assert detect("<tool_call><function=example_function>") is None
    assert detect(None) is None
    assert format_of("auto", qwen) is hermes
    assert format_of("llama3_json", qwen) is llama
    assert format_of("none", qwen) is None
