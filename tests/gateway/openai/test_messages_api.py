"""Anthropic's messages become chat messages, and what has no equivalent is refused by name. The rest: `tests.e2e`."""

from typing import Any

import pytest

from moonserve.gateway.errors import ApiError
from moonserve.gateway.openai.messages_api import MessagesBody, to_chat_body


def chat_of(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return to_chat_body(MessagesBody(messages=list(messages), **fields))


def test_a_conversation_with_tools_becomes_chat_messages() -> None:
    asked = {"role": "user", "content": "weather?"}
    texts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    called = [{"type": "thinking", "thinking": "…"}, *texts]
    called.append({"type": "tool_use", "id": "t1", "name": "get", "input": {"city": "Bern"}})
    results = [{"type": "tool_result", "tool_use_id": "t1", "content": texts}, {"type": "text", "text": "and now?"}]
    turns = ({"role": "assistant", "content": called}, {"role": "user", "content": results})
    chat = chat_of(asked, *turns, system=texts, stop_sequences=["X"], max_tokens=5, metadata={"user_id": "u"})
    function = {"name": "get", "arguments": '{"city": "Bern"}'}
    assert chat["messages"] == [
        {"role": "system", "content": "a\nb"},
        asked,
        {
            "role": "assistant",
            "content": "a\nb",
            "reasoning_content": "…",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
        {"role": "user", "content": "and now?"},
    ]
    assert (chat["stop"], chat["max_completion_tokens"], chat["user"]) == (["X"], 5, "u")
    begun = chat_of(asked, {"role": "assistant", "content": "It is"})
    assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"type": "any"}, "required"), ({"type": "none"}, "none"), (None, "auto"), ({"type": "auto"}, "auto")],
)
def test_choices_of_tools_have_their_names_in_chat(given: Any, expected: str) -> None:
    tools = [{"name": "get", "description": "d", "input_schema": {"type": "object"}}]
    chat = chat_of({"role": "user", "content": "x"}, tools=tools, tool_choice=given)
    assert chat["tool_choice"] == expected
    function = {"name": "get", "parameters": {"type": "object"}, "description": "d"}
    assert chat["tools"] == [{"type": "function", "function": function}]


def test_what_has_no_equivalent_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match="'document' are not supported"):
        chat_of({"role": "user", "content": [{"type": "document", "source": {}}]})
    with pytest.raises(ApiError, match="'bash_20250124' is not supported"):
        chat_of({"role": "user", "content": "x"}, tools=[{"type": "bash_20250124", "name": "bash"}])
    with pytest.raises(ApiError, match="must be user or assistant, not 'system'"):
        chat_of({"role": "system", "content": "x"})
