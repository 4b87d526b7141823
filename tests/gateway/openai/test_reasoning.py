"""Models that reason before they answer: by tags and in channels, through each API, with tools and with grammars."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moonserve.gateway.text.message_syntax import select
from moonserve.gateway.text.tokenizer import load_tokenizer
from moonserve.protocol.grammar import GrammarCache
from moonserve.protocol.kv_blocks import unpack_tokens
from tests.gateway.conftest import MODEL, running_gateway
from tests.gateway.scripted_cluster import ScriptedCluster

CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
SPECIAL = {"think": (), "channels": CHANNELS, "[THINK]": ("[THINK]", "[/THINK]")}
OTHER = {"think": ("<think>", "</think>", "<tool_call>", "</tool_call>"), "channels": (), "[THINK]": ()}
MESSAGES = "{% for m in messages %}{{ m.thinking or '' }}|{{ m.content }};{% endfor %}"
EFFORT = "{{ reasoning_effort or '' }}{{ '' if enable_thinking is not defined else enable_thinking }}"
TEMPLATES = {
    "think": f"{MESSAGES}{EFFORT}{{# <think></think><tool_call> #}}",
    "channels": f"{MESSAGES}{EFFORT}{{# <|channel|><|message|> #}}<|start|>assistant",
    "[THINK]": f"{MESSAGES}{{# [THINK][/THINK] #}}",
}
ANSWERS = {
    "think": "<think>\nI see.\n</think>\n\nYes.",
    "channels": "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    "[THINK]": "[THINK]I see.[/THINK]Yes.",
}
CALLS = {
    "think": '<think>\nI see.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>',
    "channels": "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 3}',
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
ASK: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    """The demo model with a family's template, and its tags as tokens in place of the last learnt ones."""
    for path in MODEL.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[family])
    spelled = json.loads((MODEL / "tokenizer.json").read_text())
    special = SPECIAL[family]
    for token in (*special, *OTHER[family]):
        spelled["model"]["merges"].pop()
        token_id = len(spelled["model"]["vocab"]) - 1
        spelled["model"]["vocab"] = {t: i for t, i in spelled["model"]["vocab"].items() if i != token_id}
        entry = {"id": token_id, "content": token, "special": token in special}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        spelled["added_tokens"].append(entry | flags)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spelled))
    return tmp_path


@pytest.fixture
async def url(cluster: ScriptedCluster, folder: Path) -> AsyncIterator[str]:
    async with running_gateway(cluster, model=str(folder), served_model_name=("m",)) as address:
        yield address


def prompt(cluster: ScriptedCluster, folder: Path) -> str:
    return load_tokenizer(folder).decode(unpack_tokens(cluster.submissions[-1].token_ids))


@pytest.mark.parametrize("family", TEMPLATES)
async def test_chats_tell_reasoning_from_the_answer(
    client: openai.AsyncOpenAI, cluster: ScriptedCluster, folder: Path, family: str
) -> None:
    cluster.answer_with(ANSWERS[family], load_tokenizer(folder))
    ask = {"model": "m", "messages": ASK, "max_tokens": 200}
    whole = await client.chat.completions.create(**ask)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "I see.")
    assert 1 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    deltas = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**ask, stream=True)]
    for name, text in (("content", "Yes."), ("reasoning_content", "I see."), ("reasoning", "I see.")):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == text
    hidden = await client.chat.completions.create(**ask, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


@pytest.mark.parametrize("family", CALLS)
async def test_reasoning_precedes_calls_and_comes_back_to_the_template(
    client: openai.AsyncOpenAI, cluster: ScriptedCluster, folder: Path, family: str
) -> None:
    cluster.answer_with(CALLS[family], load_tokenizer(folder))
    ask = {"model": "m", "messages": ASK, "tools": TOOLS, "max_tokens": 200}
    [choice] = (await client.chat.completions.create(**ask, reasoning_effort="low")).choices
    assert "low" in prompt(cluster, folder)
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3})
    assert (choice.message.reasoning_content, choice.finish_reason) == ("I see.", "tool_calls")
    ask["messages"] = [*ASK, choice.message.model_dump(exclude_none=True), *ASK]
    await client.chat.completions.create(**ask, reasoning_effort="none")
    assert "I see.|" in prompt(cluster, folder)
    assert "False" in prompt(cluster, folder)


@pytest.mark.parametrize("family", ["channels"])
async def test_responses_have_reasoning_items(
    client: openai.AsyncOpenAI, cluster: ScriptedCluster, folder: Path
) -> None:
    cluster.answer_with(ANSWERS["channels"], load_tokenizer(folder))
    async with client.responses.stream(model="m", input="hi", reasoning={"effort": "high"}) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert "high" in prompt(cluster, folder)
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "I see."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "I see."
    assert (response.output_text, response.reasoning.effort) == ("Yes.", "high")
    assert response.usage.output_tokens_details.reasoning_tokens > 1
    await client.responses.create(model="m", input="so?", previous_response_id=response.id)
    assert "I see.|Yes." in prompt(cluster, folder)


@pytest.mark.parametrize("family", ["think"])
async def test_messages_have_thinking_blocks(url: str, cluster: ScriptedCluster, folder: Path) -> None:
    import anthropic  # imported here, as it takes every test process more than a second

    cluster.answer_with(CALLS["think"], load_tokenizer(folder))
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x") as client:
        async with client.messages.stream(model="m", messages=ASK, max_tokens=200, tools=tools) as stream:
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert (message.content[0].thinking, message.content[1].input) == ("I see.", {"a": 3})
        turns = [*ASK, {"role": "assistant", "content": message.content}, *ASK]
        off: Any = {"type": "disabled"}
        again = await client.messages.create(model="m", messages=turns, max_tokens=200, tools=tools, thinking=off)
        assert [block.type for block in again.content] == ["tool_use"]
        assert "I see.|" in prompt(cluster, folder)


# Grammars


@pytest.mark.parametrize("family", TEMPLATES)
async def test_constrained_answers_may_follow_reasoning(
    client: openai.AsyncOpenAI, cluster: ScriptedCluster, folder: Path, family: str
) -> None:
    """The grammar that workers receive allows what the model was trained to write, and no other answer."""
    tokenizer, grammars = load_tokenizer(folder), GrammarCache(folder, vocab_size=4096, eos_token_ids=[4])

    async def allows(text: str, **fields: Any) -> bool:
        cluster.answer_with(text, tokenizer)
        await client.chat.completions.create(model="m", messages=ASK, max_tokens=200, **fields)
        matcher = grammars.new_matcher(cluster.submissions[-1].sampling.grammar)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    answer = ANSWERS[family]
    assert await allows(answer.replace("Yes.", '{"a": 3}'), response_format=schema)
    assert not await allows(answer.replace("Yes.", '{"b": 3}'), response_format=schema)
    assert await allows(answer, extra_body={"structured_outputs": {"grammar": 'start: "Y" rest\nrest: "es."'}})
    if family in CALLS:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            assert await allows(CALLS[family], tools=TOOLS, tool_choice=choice)
            assert not await allows(answer, tools=TOOLS, tool_choice=choice)
        auto = {"tools": TOOLS, "parallel_tool_calls": False}
        assert await allows(answer, **auto)
        assert await allows(CALLS[family], **auto)
        assert await allows(answer.replace("Yes.", '{"a": 3}'), **auto, response_format=schema)


@pytest.mark.parametrize("family", ["think"])
def test_syntax_is_detected_or_chosen(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert select("none", "auto", tokenizer).parser("", None, is_eager=True) is None
    assert select("harmony", "auto", tokenizer).has_channels
    plain = load_tokenizer(MODEL)
    assert select("auto", "none", plain).reasoning is None
    assert select("think", "none", plain).reasoning == select("auto", "none", tokenizer).reasoning is not None
    closed = select("auto", "none", tokenizer).with_reasoning("start: /a/", "<think>\n\n</think>\n", has_calls=False)
    assert closed == "start: /a/"
