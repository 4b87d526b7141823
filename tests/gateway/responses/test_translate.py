"""Items of the Responses API as messages of a chat, and refusals that name what is wrong."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.errors import ApiError
from gateway.openai.responses.schema import ResponsesBody, chat_of, input_messages

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def test_calls_belong_to_the_message_before_them_and_results_are_the_tools() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm"}]},
        {"type": "reasoning", "summary": []},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    messages = input_messages(items)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool"]
    assert [c["id"] for c in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "sun"}


def test_formats_tools_and_lengths_go_by_their_names_in_a_chat() -> None:
    body = ResponsesBody(
        input="hi",
        instructions="be brief",
        max_output_tokens=9,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        tools=[{"type": "function", "name": "f", "parameters": {}}],
        tool_choice={"type": "function", "name": "f"},
    )
    chat = chat_of(body, input_messages("hi"))
    assert chat["messages"][0] == {"role": "system", "content": "be brief"}
    assert chat["max_completion_tokens"] == 9
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "output", "call_id", "name"]) | st.text(max_size=4),
            inner | st.sampled_from(["message", "function_call", "function_call_output", "input_text"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.sampled_from(["type", "role", "content", "output"]), _json)))
def test_any_items_are_messages_or_a_refusal(items: list[dict[str, Any]]) -> None:
    status = 200
    try:
        messages = input_messages(items)
        assert all(isinstance(message["role"], str) for message in messages)
    except ApiError as error:
        status = error.status
    assert status in (200, 400)
