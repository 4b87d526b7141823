"""Chats with tools: data for the template, the workers and the client; grammars that enforce calls; refusals."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moonserve.gateway.errors import ApiError
from moonserve.gateway.openai.request_schema import BodyParser, ChatBody
from moonserve.gateway.openai.structured_outputs import ConstraintChecker, constraint_of
from moonserve.gateway.openai.tool_call_grammar import ToolPlan, ToolPlanner
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.gateway.text.tool_call_parsers import FORMATS, detect, select_syntax
from moonserve.protocol.kv_blocks import unpack_tokens
from tests.gateway.conftest import GRAMMARS, MODEL, clients_of, content_by_choice, events, follows, post, refused
from tests.gateway.scripted_cluster import ScriptedCluster

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<tool_call> {% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %};"
    "{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": {"a": None}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "max_tokens": 200}


@pytest.fixture
async def http(cluster: ScriptedCluster, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Client of a gateway whose model's template uses Hermes calls."""
    for path in MODEL.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    async with clients_of(cluster, model=str(tmp_path)) as session:
        yield session


async def ask(http: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    [choice] = (await post(http, PATH, {**CHAT, **fields}))["choices"]
    return choice


async def test_call_is_not_content_and_sets_the_finish_reason(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    cluster.answer_with(f"I add.\n{CALL}\n{CALL}", tokenizer)
    choice = await ask(http)
    assert content_by_choice(await events(http, PATH, CHAT)) == content_by_choice([{"choices": [choice]}])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I add."
    ids = {call.pop("id") for call in message["tool_calls"]}
    assert len(ids) == 2
    called = {"type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
    assert message["tool_calls"] == [called, called]
    cluster.answer_with(CALL, tokenizer)
    assert (await ask(http))["message"]["content"] is None


async def test_other_text_is_content_and_a_truncated_call_is_partial(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    broken = CALL.replace("2]", "2 oh")  # a stream has already started to report it as a call
    for wrong, streamed in ((CALL.replace("add", "rm"), None), (broken, "oh}}\n</tool_call>")):
        cluster.answer_with(wrong, tokenizer)
        choice = await ask(http)
        assert choice["message"] == {"role": "assistant", "content": wrong, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert content_by_choice(await events(http, PATH, CHAT))[0].text == (streamed or wrong)
    cluster.answer_with(CALL, tokenizer)
    start = tokenizer.encode(CALL.partition("1")[0], add_special_tokens=False)
    choice = await ask(http, max_tokens=len(start))
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert '{"a": [1, 2]}'.startswith(call["function"]["arguments"])
    assert (await ask(http, tool_choice="none"))["message"]["content"] == CALL


async def test_template_receives_tools_and_worker_receives_the_grammar(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    called = {"name": "add", "arguments": '{"a": 41}'}
    history = [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]  # fmt: skip
    messages = CHAT["messages"] + history
    await ask(http, messages=messages, tool_choice="required", max_tokens=2)
    [submitted] = cluster.submissions
    prompt = tokenizer.decode(unpack_tokens(submitted.token_ids))
    expected = f"<tool_call> {json.dumps(TOOL)}user: hi;assistant: 41;tool: 42;"
    assert prompt == expected
    assert "tool_call" in submitted.sampling.grammar
    tokenized = await post(http, "/tokenize", {"messages": messages, "tools": [TOOL]})
    assert tokenized["tokens"] == list(unpack_tokens(submitted.token_ids))
    history[0]["tool_calls"][0]["function"]["arguments"] = "{"
    error = await refused(http, PATH, 400, json={**CHAT, "messages": messages})
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_arguments_with_half_a_surrogate_pair_are_refused(http: aiohttp.ClientSession) -> None:
    """JSON can encode half of a surrogate pair, which no tokenizer accepts."""
    called = {"name": "add", "arguments": '{"a": "\\ud83d"}'}
    call = {"id": "call_1", "type": "function", "function": called}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    for path in (PATH, "/tokenize"):
        assert (await refused(http, path, 400, json={"messages": messages}))["param"] == "messages"


async def test_responses_api_returns_calls(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    cluster.answer_with(CALL, tokenizer)
    tool = {"type": "function", **TOOL["function"]}
    body = {"input": "hi", "tools": [tool], "max_output_tokens": 100}
    [item] = (await post(http, "/v1/responses", body))["output"]
    assert (item["type"], item["name"]) == ("function_call", "add")
    assert item["arguments"] == '{"a": [1, 2]}'


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
# llguidance cannot follow this schema exactly.
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
        ConstraintChecker(GRAMMARS),
        allows_auto=allows_auto,
        tag_rule=lambda text: "<[7]>" if text == special else json.dumps(text),
    )
    return await planner.plan(body, constraint_of(body))


def allows(plan: ToolPlan | None, text: str, tokenizer: Tokenizer) -> bool:
    return follows(plan.grammar, text, tokenizer)


def call(kind: str, name: str, arguments: str) -> str:
    if kind == "hermes":
        inner = f'{{"name": "{name}", "arguments": {arguments}}}'
        return f"<tool_call>\n{inner}\n</tool_call>"
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.mark.parametrize(("kind", "between"), [("hermes", "\n"), ("llama3_json", "; ")])
async def test_required_choice_allows_only_calls_of_offered_functions(
    kind: str, between: str, tokenizer: Tokenizer
) -> None:
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


@pytest.mark.parametrize("kind", ["hermes", "llama3_json"])
async def test_automatic_choice_allows_any_text_until_a_call(kind: str, tokenizer: Tokenizer) -> None:
    assert (await plan_of(kind, tools=TOOLS)) == (await plan_of(kind, tools=TOOLS, tool_choice="auto"))
    free = await plan_of(kind, tools=TOOLS)
    assert free.grammar == ""
    strict = await plan_of(kind, tools=[tool(ADD, strict=True), tool(NOW)])
    for text in ("", "I know: <b> 4", call(kind, "add", '{"a": 3}'), call(kind, "now", '{"x": 1}')):
        assert allows(strict, text, tokenizer), text
    for text in (call(kind, "add", '{"b": 3}'), call(kind, "rm", "{}")):
        assert not allows(strict, text, tokenizer), text


async def test_strict_calls_allow_text_around_and_parallel_calls_can_be_forbidden(tokenizer: Tokenizer) -> None:
    one = call("hermes", "add", '{"a": 3}')
    strict = await plan_of(tools=[tool(ADD, strict=True)])
    assert allows(strict, f"Well.\n{one}\n{one} so", tokenizer)
    single = await plan_of(tools=TOOLS, parallel_tool_calls=False)
    assert allows(single, f"Well.\n{one}", tokenizer)
    assert not allows(single, f"{one}\n{one}", tokenizer)


async def test_constraint_applies_if_the_model_does_not_call(tokenizer: Tokenizer) -> None:
    json_object = {"type": "json_object"}
    plan = await plan_of(tools=TOOLS, response_format=json_object)
    assert allows(plan, '{"z": [1]}', tokenizer)
    assert allows(plan, call("hermes", "add", '{"a": 3}'), tokenizer)
    assert not allows(plan, "hello", tokenizer)
    with pytest.raises(ApiError, match="cannot be combined with tool_choice auto"):
        await plan_of("llama3_json", tools=TOOLS, response_format=json_object)


async def test_grammar_uses_special_tokens_for_tags(tokenizer: Tokenizer) -> None:
    """A tag that is one token is that token in the grammar."""
    spelled = tokenizer.decode([7]) + call("hermes", "add", '{"a": 3}').removeprefix("<tool_call>")
    for choice in ("required", "auto"):
        plan = await plan_of(tools=[tool(ADD, strict=True)], tool_choice=choice, special="<tool_call>")
        assert allows(plan, spelled, tokenizer)


async def test_unsupported_schemas_are_refused_only_for_strict_functions(tokenizer: Tokenizer) -> None:
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
async def test_contradictory_tool_parameters_are_refused(kind: str | None, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        await plan_of(kind, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_no_plan_without_tools_or_with_choice_none() -> None:
    assert await plan_of(None) is None
    assert await plan_of(None, tools=TOOLS, tool_choice="none") is None
    assert await plan_of(allows_auto=False, tools=TOOLS, tool_choice="required") is not None


def test_template_selects_the_call_syntax_unless_the_flag_names_one() -> None:
    hermes, llama = FORMATS["hermes"], FORMATS["llama3_json"]
    qwen = 'return a json object within <tool_call></tool_call> tags: {"name": …, "arguments": …}'
    llama3 = 'Respond in the format {"name": function name, "parameters": …}. <|python_tag|>'
    assert detect(qwen) is hermes
    assert detect(llama3) is llama
    assert detect("{{ messages }}") is None
    assert detect("<tool_call><function=example_function>") is None
    assert detect(None) is None
    assert select_syntax("auto", qwen) is hermes
    assert select_syntax("llama3_json", qwen) is llama
    assert select_syntax("none", qwen) is None
