"""Chats with tools over HTTP: what the template and the workers get, and what the client gets of the model's text."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.text.tokenizer import Tokenizer
from protocol.keys import unpack_tokens
from tests.gateway.conftest import MODEL, clients_of, events, post, said
from tests.gateway.scripted_cluster import ScriptedCluster

PATH = "/v1/chat/completions"
END_OF_TURN = 4
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
    """A gateway whose model's template shows Hermes calls."""
    for path in MODEL.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    async with clients_of(cluster, model=str(tmp_path)) as session:
        yield session


def answers(cluster: ScriptedCluster, tokenizer: Tokenizer, text: str) -> None:
    cluster.tokens = [*tokenizer.encode(text, add_special_tokens=False), END_OF_TURN]


async def ask(http: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    [choice] = (await post(http, PATH, {**CHAT, **fields}))["choices"]
    return choice


async def test_a_call_is_no_content_and_why_the_answer_ended(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    answers(cluster, tokenizer, f"I add.\n{CALL}\n{CALL}")
    choice = await ask(http)
    assert said(await events(http, PATH, CHAT)) == said([{"choices": [choice]}])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I add."
    ids = {call.pop("id") for call in message["tool_calls"]}
    assert len(ids) == 2
    called = {"type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
    assert message["tool_calls"] == [called, called]
    answers(cluster, tokenizer, CALL)
    assert (await ask(http))["message"]["content"] is None


async def test_what_is_no_call_is_content_and_a_cut_call_is_as_far_as_it_goes(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    broken = CALL.replace("2]", "2 oh")  # which a stream has begun to tell as a call
    for wrong, streamed in ((CALL.replace("add", "rm"), None), (broken, "oh}}\n</tool_call>")):
        answers(cluster, tokenizer, wrong)
        choice = await ask(http)
        assert choice["message"] == {"role": "assistant", "content": wrong, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert said(await events(http, PATH, CHAT))[0].text == (streamed or wrong)
    answers(cluster, tokenizer, CALL)
    start = tokenizer.encode(CALL.partition("1")[0], add_special_tokens=False)
    choice = await ask(http, max_tokens=len(start))
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert '{"a": [1, 2]}'.startswith(call["function"]["arguments"])
    assert (await ask(http, tool_choice="none"))["message"]["content"] == CALL


async def test_the_template_gets_tools_and_calls_and_the_worker_the_grammar(
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
    async with http.post(PATH, json={**CHAT, "messages": messages}) as response:
        error = (await response.json())["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_arguments_with_half_a_character_are_refused(http: aiohttp.ClientSession) -> None:
    """JSON can spell half of a surrogate pair, of which no tokenizer makes anything."""
    called = {"name": "add", "arguments": '{"a": "\\ud83d"}'}
    call = {"id": "call_1", "type": "function", "function": called}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    for path in (PATH, "/tokenize"):
        async with http.post(path, json={"messages": messages}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "messages")


async def test_calls_come_through_the_responses_api(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    answers(cluster, tokenizer, CALL)
    tool = {"type": "function", **TOOL["function"]}
    body = {"input": "hi", "tools": [tool], "max_output_tokens": 100}
    [item] = (await post(http, "/v1/responses", body))["output"]
    assert (item["type"], item["name"]) == ("function_call", "add")
    assert item["arguments"] == '{"a": [1, 2]}'
