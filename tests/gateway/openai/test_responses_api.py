"""`/v1/responses` with the official client and a scripted cluster: its items as chat messages, and its store."""

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.errors import ApiError
from moonserve.gateway.openai.responses_api import ResponseStore, StoredResponse
from moonserve.gateway.openai.responses_api_schema import ResponsesBody, input_messages, to_chat_body
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.kv_blocks import unpack_tokens
from tests.gateway.conftest import running_gateway
from tests.gateway.scripted_cluster import ScriptedCluster
from tests.gateway.test_fuzz import VALUES

TEXT = " to be or"  # three tokens of the script


async def test_response_has_its_output_and_logprobs(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        model="demo", input="hi", max_output_tokens=3, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    assert (response.output_text, response.status) == (TEXT, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3
    assert response.error is None
    [item] = response.output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text"
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]
    assert "".join(entry.token for entry in part.logprobs) == TEXT


async def test_stream_ends_with_the_response_that_is_stored(client: openai.AsyncOpenAI) -> None:
    """A stream ends with a response that can be retrieved by id. The id includes `x-request-id`, slashes too."""
    stream = await client.responses.create(
        model="demo", input="hi", max_output_tokens=3, stream=True, extra_headers={"x-request-id": "team/7"}
    )
    first, *others, last = [event async for event in stream]
    assert "".join(each.delta for each in others if each.type == "response.output_text.delta") == TEXT
    assert first.type == "response.created"
    assert last.type == "response.incomplete"
    assert last.response.id.startswith("resp_team/7")
    assert await client.responses.retrieve(last.response.id) == last.response
    await client.responses.delete(last.response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(last.response.id)


async def test_response_continues_an_earlier_one(
    client: openai.AsyncOpenAI, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    """The prompt is the conversation: earlier input and output, then the new instructions and the new input."""
    first = await client.responses.create(model="demo", input="one", instructions="be brief", max_output_tokens=3)
    await client.responses.create(model="demo", input="two", previous_response_id=first.id, max_output_tokens=1)
    asked = cluster.submissions
    before, after = (tokenizer.decode(unpack_tokens(each.token_ids)[: each.num_prompt_tokens]) for each in asked)
    assert "be brief" in before
    assert "be brief" not in after
    assert after.index("one") < after.index(TEXT.strip()) < after.index("two")


async def test_response_with_store_false_cannot_be_continued(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="demo", input="one", store=False, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="demo", input="two", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "previous_response_not_found"


async def test_responses_are_visible_only_to_their_tenant(cluster: ScriptedCluster) -> None:
    keys = ("alice=a-key", "bob=b-key")
    async with running_gateway(cluster, tenant_keys=keys) as url:
        alice, bob = (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("a-key", "b-key")
        )
        response = await alice.responses.create(model="demo", input="hi", max_output_tokens=1)
        assert (await alice.responses.retrieve(response.id)).id == response.id
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(response.id)
        await alice.close()
        await bob.close()


async def test_unsupported_parameters_are_refused_under_their_own_names(client: openai.AsyncOpenAI) -> None:
    refused: list[tuple[dict, str]] = [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
    ]
    for parameters, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "demo", "input": "hi", **parameters})
        assert caught.value.param == param


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def test_calls_join_the_preceding_message_and_outputs_become_tool_messages() -> None:
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


def test_formats_tools_and_lengths_map_to_chat_parameters() -> None:
    body = ResponsesBody(
        input="hi",
        instructions="be brief",
        max_output_tokens=9,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        tools=[{"type": "function", "name": "f", "parameters": {}}],
        tool_choice={"type": "function", "name": "f"},
    )
    chat = to_chat_body(body, input_messages("hi"))
    assert chat["messages"][0] == {"role": "system", "content": "be brief"}
    assert chat["max_completion_tokens"] == 9
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}


@given(st.lists(st.dictionaries(st.sampled_from(["type", "role", "content", "output"]), VALUES)))
def test_any_items_convert_or_are_refused(items: list[dict[str, Any]]) -> None:
    status = 200
    try:
        messages = input_messages(items)
        assert all(isinstance(message["role"], str) for message in messages)
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


def stored(size: int, name: str = "") -> StoredResponse:
    return StoredResponse(response={"id": name}, messages=[{"content": "x" * size}])


def test_one_tenant_cannot_evict_the_responses_of_another() -> None:
    store = ResponseStore(5_000)
    store.put("quiet", "mine", stored(500))
    for number in range(100):
        store.put("flood", f"resp_{number}", stored(500))
    assert store.get("quiet", "mine") is not None
    assert store.get("flood", "resp_99") is not None
    assert store.get("flood", "resp_0") is None


def test_store_evicts_the_least_recently_used_response() -> None:
    store = ResponseStore(1_500)
    for name in "abc":
        store.put("t", name, stored(400))
        store.get("t", "a")
    store.put("t", "d", stored(400))
    assert store.get("t", "a") is not None
    assert store.get("t", "b") is None


_steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "remove"]), st.sampled_from("xy"), st.sampled_from("abcde"), st.integers(0, 900)
    ),
    max_size=60,
)


@given(_steps, st.sampled_from([0, 2_000]))
def test_store_keeps_its_bound_and_accounting(steps: list, max_bytes: int) -> None:
    store = ResponseStore(max_bytes)
    for kind, tenant, name, size in steps:
        if kind == "put":
            store.put(tenant, name, stored(size))
            assert store.get(tenant, name) is not None or size > 0 or not max_bytes
        elif kind == "get":
            store.get(tenant, name)
        else:
            store.remove(tenant, name)
            assert store.get(tenant, name) is None
        store.validate()
    assert max_bytes or not len(store)
